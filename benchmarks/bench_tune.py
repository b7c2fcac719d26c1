"""Acceptance before and after `mtp-export tune` on the trained fixture, and its losses by step.

    python -m benchmarks.bench_tune --folder WORK [--base int4] [--draft mtp] [--k 5] [--steps N]

The prompts to train on are cut from the modules that the fixture was trained on, in the same way
as fixtures/prompts.jsonl, on which acceptance is measured: 64 prompts, 128 new tokens each. Those
that have a run of 16 tokens in common with one of these are left out. --base int4 quantizes the
fixture first, every linear of the main model to int4 and the MTP module to int8; source keeps it as
it is. Rows to train on are made by the fixture's training code (common/tiny_target.py), those
to measure on by the runtime. An interrupted run goes on. Adds a row to tune.json in --out
(benchmarks/results). Times are those of the processor, all threads together; rows that an earlier
run left are not in them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.measure import machine
from benchmarks.common.tiny_prompts import held_out_prompts, training_prompts
from benchmarks.common.tiny_target import TinyWriter
from mtp_export import state_files
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.precision import Int4Scope
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.commands.tune import Bars, result_facts
from mtp_export.progress import silent
from mtp_export.tune.drafts import DRAFTS
from mtp_export.tune.options import DataOptions, TrainOptions, TuneOptions
from mtp_export.tune.rows import Rows
from mtp_export.tune.run import open_checked, row_stores, tune

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "fixtures/deepseek-v3-tiny"


# Options of the quantization that makes the bundle which is tuned.
BASES: dict[str, dict[str, Any]] = {
    "source": {},
    "int4": {
        "base_quant": "weight_only_int4",
        "mtp_quant": "weight_only_int8",
        "int4_scope": Int4Scope.ALL,
        "group_size": 64,
    },
}


def write_prompts(path: Path, prompts: Iterable[Sequence[int]]) -> None:
    """Write the token ids of prompts."""
    lines = (json.dumps({"prompt_token_ids": list(prompt)}) for prompt in prompts)
    path.write_text("\n".join(lines) + "\n")


def make_bundle(base: str, folder: Path) -> Path:
    """Quantize the fixture, once."""
    output = folder / f"bundle-{base}"
    if not (output / "mtp_export.json").is_file():
        options = QuantizeOptions(BundleOptions(SOURCE, output), **BASES[base])
        run_bundle(plan_quantize(options), silent)
    return output


def make_rows(options: TuneOptions, answered: Iterable[Path]) -> None:
    """Make the rows to train on; texts of other drafts' rows for this target are read again."""
    source = open_checked(options)
    store, _ = row_stores(options, source)
    kind = DRAFTS[options.draft]
    prompts = {line.prompt for line in store.lines}
    texts = [
        text
        for path in answered
        for text in Rows.of(state_files.load(path, mapped=True)).texts.texts
    ]
    answers = {
        own: text.tokens[text.prompt_size :]
        for text in texts
        if (own := text.tokens[: text.prompt_size]) in prompts
    }
    taps = kind.taps(len(source.family.layers))
    writer = cache(lambda: TinyWriter.of(options.bundle, kind.fed(source), taps, answers))
    store.make(writer, Bars().texts(len(store.lines)))


def main() -> None:
    """Tune, and record the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="bundles, rows, saved states")
    parser.add_argument("--base", choices=BASES, default="int4")
    parser.add_argument("--draft", choices=DRAFTS, default="mtp")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    prompts, measured = given.folder / f"prompts-{given.prompts}.jsonl", given.folder / "held.jsonl"
    if not prompts.exists():
        write_prompts(measured, held_out_prompts())
        write_prompts(prompts, training_prompts(given.prompts))
    train = TrainOptions(k=given.k, steps=given.steps, rate=given.lr, dtype=given.dtype)
    options = TuneOptions(
        bundle=make_bundle(given.base, given.folder),
        output_dir=given.folder / f"tuned-{given.base}-{given.draft}-k{given.k}-{given.steps}",
        data=DataOptions(prompts, held_out=measured),
        draft=given.draft,
        train=train,
        workdir=given.folder / f"work-{given.base}",
        overwrite=True,
    )
    make_rows(options, sorted(options.work.glob("rows-*/training/*.pt")))
    result = tune(options, Bars())
    assert result is not None
    path = given.out / "tune.json"
    facts = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "rows": {}}
    del (row := result_facts(result))["output_dir"]
    count = len(prompts.read_text().splitlines())
    row |= {"base": given.base, "train": asdict(train), "prompts": count}
    row["process_cpu_seconds"] = round(time.process_time(), 1)
    facts["rows"][f"{given.base}, {given.draft}, k={given.k}, {given.steps} steps"] = row
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
