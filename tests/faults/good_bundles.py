"""Good bundles of the trained fixtures in pairs of schemes and for targets, judged as the faults of
`blind` are, without a source: whatever fails is a false alarm.

python -m faults.good_bundles --seeds 20 --into FOLDER   (with tests/ on the path; too long for the
test suite). What prompts do not change is judged once per bundle, the rest once per seed of them.
FOLDER/judged.jsonl has one line for each.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from cases import export, quantize
from faults.blind import ROOT, judged
from faults.small_model import ROWS, TARGETS
from faults.sweep import prompts_of

# Rows that the runtime runs. Those of w4afp8 have one scale per 128 weights, more than an expert's.
PAIRS = [row for row in ROWS if row != "w4afp8" and "GGUF" not in row]
OF_BUNDLE, OF_PROMPTS = ("files", "ledger", "likelihood"), ("acceptance", "controls")
_PROMPTS = 16
_FIXTURES = ("glm4-moe-tiny", "qwen3-5-tiny")


def made(fixture: str, name: str, bundle: Path) -> str:
    """Write a bundle; return why its row or target refuses the fixture, "" where it does not."""
    shutil.rmtree(bundle, ignore_errors=True)
    source = ROOT / "fixtures" / fixture
    if name in TARGETS:
        outcome = export(source, bundle, "--target", name, "--link", "copy", "--quiet")
    else:
        base, mtp, *more = ROWS[name]
        schemes = ("--base-quant", base, "--mtp-quant", mtp, *more)
        outcome = quantize(source, bundle, *schemes, "--quiet")
    return outcome.err if outcome.code else ""


def results(bundle: Path, seeds: int, prompts: Path) -> Iterator[dict[str, object]]:
    """Judge a bundle by itself, then over seeds of prompts."""
    said, seconds = judged(bundle, OF_BUNDLE)
    yield {"seed": None, "said": said, "seconds": seconds}
    for seed in range(seeds):
        rows = (
            json.dumps({"prompt_token_ids": list(prompt)}) for prompt in prompts_of(seed, _PROMPTS)
        )
        prompts.write_text("\n".join(rows) + "\n")
        said, seconds = judged(bundle, OF_PROMPTS, prompts)
        yield {"seed": seed, "said": said, "seconds": seconds}


def run(seeds: int, into: Path) -> None:
    """Judge every bundle, and note what fails."""
    torch.set_num_threads(1)
    into.mkdir(parents=True, exist_ok=True)
    with (into / "judged.jsonl").open("a") as record:
        for name, fixture in product([*PAIRS, *TARGETS], _FIXTURES):
            bundle = into / "bundle"
            refused = made(fixture, name, bundle)
            found = [{"refused": refused}] if refused else results(bundle, seeds, into / "prompts")
            for one in found:
                record.write(json.dumps({"fixture": fixture, "name": name, **one}) + "\n")
                record.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    run(options.seeds, options.into)
