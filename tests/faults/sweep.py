"""Run-level faults and false alarms over many seeds of prompts. Writes docs/run_faults.md.

python -m faults.sweep --seeds 20   (with tests/ on the path; too long for the test suite)
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cases import export
from faults.run_faults import DRAFTER_FAULTS, RUN_FAULTS
from mtp_export.verify.check import Item, Status
from mtp_export.verify.decoding import controls
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.decoding.drafter_agreement import drafter_items
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.prompts import Prompt
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
K = 2


@dataclass
class Tally:
    """Seeds that caught and that named a fault, and what was said instead of naming it."""

    caught: int = 0
    named: int = 0
    missed: list[str] = field(default_factory=list)

    def add(self, seed: int, items: list[Item], cause: str) -> None:
        failed = [item for item in items if item.status is Status.FAIL]
        named = any(cause in item.cause for item in failed)
        self.caught += bool(failed)
        self.named += named
        if not named:
            said = "; ".join(item.cause for item in failed) or "nothing"
            self.missed.append(f"seed {seed}: {said}")


def prompts_of(seed: int, count: int) -> list[Prompt]:
    """Held-out prompts, chosen and cut at random."""
    chance = random.Random(seed)
    tokenizer = Tokenizer.find(FIXTURE)
    lines = (ROOT / "fixtures/prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in chance.sample(lines, count)]
    return [tokenizer.encode(text)[: chance.randint(48, 128)] for text in texts]


Found = tuple[dict[str, Tally], list[str], int]


def merged(parts: list[Found]) -> Found:
    """Several results added up."""
    tallies, alarms, looked_at = parts[0]
    for other, more, count in parts[1:]:
        for name, tally in other.items():
            tallies[name].caught += tally.caught
            tallies[name].named += tally.named
            tallies[name].missed += tally.missed
        alarms = alarms + more
        looked_at += count
    return tallies, alarms, looked_at


def shells(good: Path, folder: Path) -> Iterator[Model]:
    """Models of bundles with each fault, without their main layers."""
    for number, fault in enumerate(RUN_FAULTS):
        bundle = Path(shutil.copytree(good, folder / f"fault{number}"))
        fault.plant(bundle)
        with torch.inference_mode():
            opened = open_model(bundle, LoadOptions())
            yield opened.model(TorchExecution(), layers=0)
        shutil.rmtree(bundle)


def sweep(seeds: range, count: int, tokens: int) -> Found:
    """Tallies by fault, false alarms, and the number of items of good runs."""
    torch.set_num_threads(1)
    tallies = {fault.name: Tally() for fault in (*RUN_FAULTS, *DRAFTER_FAULTS)}
    alarms: list[str] = []
    items_looked_at = 0
    with tempfile.TemporaryDirectory() as name:
        good = Path(name) / "good"
        assert export(FIXTURE, good, "--link", "copy", "--quiet").code == 0
        model = load_model(good, LoadOptions()).model
        faulty = list(shells(good, Path(name)))
        for seed in seeds:
            corpus = Corpus(model, tuple(prompts_of(seed, count)), tokens)
            items = [*diagnosed(corpus), *drafter_items(corpus, K), *controls.items_of(corpus)]
            items_looked_at += len(items)
            alarms += [
                f"seed {seed}: {i.name}: {i.cause}" for i in items if i.status is Status.FAIL
            ]
            for fault, shell in zip(RUN_FAULTS, faulty, strict=True):
                own = Corpus(
                    model=shell,
                    prompts=corpus.prompts,
                    new_tokens=tokens,
                    given=corpus.texts,
                    given_states=corpus.states,
                )
                tallies[fault.name].add(seed, list(diagnosed(own)), fault.cause)
            for drafter in DRAFTER_FAULTS:
                real = DRAFTERS["mtp"]
                DRAFTERS["mtp"] = replace(real, build=drafter.build)
                own = Corpus(
                    model=model,
                    prompts=corpus.prompts,
                    new_tokens=tokens,
                    given=corpus.texts,
                    given_states=corpus.states,
                )
                tallies[drafter.name].add(seed, list(drafter_items(own, K)), drafter.cause)
                DRAFTERS["mtp"] = real
            missed = [name for name, tally in tallies.items() if tally.missed]
            sys.stderr.write(f"seed {seed}: {len(alarms)} false alarms, missed {missed} so far\n")
    return tallies, alarms, items_looked_at


def page(options: argparse.Namespace, commit: str, found: Found) -> str:
    """The result as Markdown."""
    tallies, alarms, looked_at = found
    lines = [
        "# Run-level faults over seeds of prompts",
        "",
        f"`python -m faults.sweep --seeds {options.seeds} --prompts {options.prompts} --tokens"
        f" {options.tokens}`: {options.prompts} held-out prompts per seed, cut at random, "
        f"{options.tokens} new tokens each; commit {commit}.",
        "No source was given: each fault shows by running the bundle alone.",
        "",
        f"Good bundle: {len(alarms)} false alarms in {looked_at} items over {options.seeds} seeds.",
        "",
        "| fault | seen as | caught | named |",
        "|---|---|--:|--:|",
    ]
    for fault in (*RUN_FAULTS, *DRAFTER_FAULTS):
        tally = tallies[fault.name]
        lines.append(
            f"| {fault.name} | {fault.seen_as or '–'} | {tally.caught}/{options.seeds} "
            f"| {tally.named}/{options.seeds} |"
        )
    missed = [f"- {name}, {m}" for name, tally in tallies.items() for m in tally.missed]
    if missed or alarms:
        lines += [
            "",
            "What was not named, and false alarms:",
            "",
            *missed,
            *map("- {}".format, alarms),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/run_faults.md")
    options = parser.parse_args()
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with ProcessPoolExecutor(options.workers) as pool:
        runs = [
            pool.submit(
                sweep,
                range(first, options.seeds, options.workers),
                options.prompts,
                options.tokens,
            )
            for first in range(options.workers)
        ]
        found = merged([run.result() for run in runs])
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(page(options, commit.strip(), found))


if __name__ == "__main__":
    main()
