"""Acceptance before and after `mtp-export tune` on the trained fixture, and its losses by step.

    python -m benchmarks.bench_tune --folder WORK [--base int4] [--draft mtp] [--k 5] [--steps N]

The prompts to train on are cut from the modules that the fixture was trained on, in the same way
as fixtures/prompts.jsonl, on which acceptance is measured: 64 prompts, 128 new tokens each. --base
int4 quantizes the fixture first, every linear of the main model to int4 and the MTP module to int8;
source keeps it as it is. An interrupted run goes on. Adds a row to tune.json in --out
(benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.bench_export import machine
from fixtures.tiny.data import standard_library
from fixtures.tiny.prompts import COUNTS, make_prompts, prompt_ids, read_prompts
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.quantize import Int4Scope, QuantizeOptions, plan_quantize
from mtp_export.commands.tune import Bars, result_facts
from mtp_export.progress import silent
from mtp_export.tune.drafts import DRAFTS
from mtp_export.tune.options import DataOptions, TrainOptions, TuneOptions
from mtp_export.tune.run import tune

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "fixtures/deepseek-v3-tiny"
PROMPT_SEED = 19


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


def write_prompts(path: Path, items: Iterable[dict[str, str]]) -> None:
    """Write prompts as token ids, those of chat in the chat template."""
    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    ids = (prompt_ids(tokenizer, item["kind"], item["prompt"]) for item in items)
    lines = (json.dumps({"prompt_token_ids": own}) for own in ids)
    path.write_text("\n".join(lines) + "\n")


def training_prompts(count: int) -> list[dict[str, str]]:
    """Make prompts of the training modules, in the proportions of the held-out ones."""
    tokenizer = Tokenizer.from_file(str(SOURCE / "tokenizer.json"))
    counts = {kind: count * own // sum(COUNTS.values()) for kind, own in COUNTS.items()}
    training, _ = standard_library()
    return make_prompts(training, tokenizer, PROMPT_SEED, counts)


def make_bundle(base: str, folder: Path) -> Path:
    """Quantize the fixture, once."""
    output = folder / f"bundle-{base}"
    if not (output / "mtp_export.json").is_file():
        options = QuantizeOptions(BundleOptions(SOURCE, output), **BASES[base])
        run_bundle(plan_quantize(options), silent)
    return output


def main() -> None:
    """Tune, and record the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="bundles, rows, saved states")
    parser.add_argument("--base", choices=BASES, default="int4")
    parser.add_argument("--draft", choices=DRAFTS, default="mtp")
    parser.add_argument("--prompts", type=int, default=640)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    prompts, measured = given.folder / f"prompts-{given.prompts}.jsonl", given.folder / "held.jsonl"
    if not prompts.exists():
        write_prompts(measured, read_prompts(ROOT / "fixtures/prompts.jsonl"))
        write_prompts(prompts, training_prompts(given.prompts))
    train = TrainOptions(k=given.k, steps=given.steps, rate=given.lr, dtype=given.dtype)
    options = TuneOptions(
        bundle=make_bundle(given.base, given.folder),
        output_dir=given.folder / f"tuned-{given.base}-{given.draft}-k{given.k}-{given.steps}",
        data=DataOptions(prompts, held_out=measured),
        draft=given.draft,
        train=train,
        workdir=given.folder / "work",
        overwrite=True,
    )
    start = time.monotonic()
    result = tune(options, Bars())
    assert result is not None
    path = given.out / "tune.json"
    facts = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "rows": {}}
    del (row := result_facts(result))["output_dir"]
    row |= {"base": given.base, "train": asdict(train), "prompts": given.prompts}
    row["seconds"] = round(time.monotonic() - start, 1)
    facts["rows"][f"{given.base}, {given.draft}, k={given.k}, {given.steps} steps"] = row
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
