"""Faults drawn at random, each exported whole and judged with its source and without.

python -m faults.blind --count 60 --seed 7 --into FOLDER   (with tests/ on the path; too long for
the test suite). FOLDER/judged.jsonl has one line per fault: what was drawn, what it changes, what
failed; a run goes on behind what it has. --first N draws the faults from N on, so that two runs can
share one seed. A fault is planted into a trained fixture in bf16, which is then exported in a row
of the precision table, so that checksums and manifest agree with the damage.

A fault is caught where a check fails. It is named where one sentence has words for its place and
for its kind, as `drawn_faults` writes them down; exactly named where those words are the kind's
alone, and not of several kinds that the sentence offers. What a fault of the main model costs, in
nats per token of plain code, is recorded beside: tokens and acceptance may change where the model
is no worse for it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cases import quantize
from faults.drawn_faults import FIXTURES, ROWS, UNCHANGED, Drawn, draw, plant
from faults.matrix import no_progress
from mtp_export.verify import CHECKS, check_result
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import controls, likelihood
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.decoding.changed import CONFIDENCE
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import JUDGING, MORE_JUDGING_PASSAGES, PlainTexts
from mtp_export.verify.evidence.prompts import BUILT_IN
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.streaming import open_streamed
from mtp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 32
LEAST_CHANGE = 0.01
Judge = Callable[[Context], Iterator[Item]]


def _whole(name: str) -> Judge:
    return lambda context: iter(check_result(name, CHECKS[name], context).items)


# The checks that look at the bundle; the others look at the runtime, of which nothing is wrong.
JUDGES: dict[str, Judge] = {
    "files": _whole("files"),
    "ledger": _whole("ledger"),
    "likelihood": likelihood.run,
    "acceptance": lambda context: (
        iter(()) if context.main_damage else diagnosed(context.corpus, context=context)
    ),
    "controls": lambda context: controls.items_of(context.corpus),
}
WITH_SOURCE: dict[str, Judge] = {name: _whole(name) for name in ("files", "ledger", "weights")}


class Effects:
    """Changes of tokens, of acceptance and of the likelihood of plain code, each fixture's beside
    those of the good one."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._good: dict[str, Corpus] = {}
        self._likely: dict[str, Likelihood] = {}

    def of(self, drawn: Drawn, bundle: Path) -> tuple[float, float]:
        """Share of the best tokens that differ, and the change of acceptance at two drafts."""
        if drawn.fixture not in self._good:
            self._good[drawn.fixture] = self._corpus(self._folders[drawn.fixture])
        good = self._good[drawn.fixture]
        other = self._corpus(bundle, good)
        with torch.inference_mode():
            tokens = float((good.choices != other.choices).float().mean())
            shares = [_accepted(one) for one in (good, other)]
        return tokens, shares[1] - shares[0]

    def cost(self, drawn: Drawn, bundle: Path) -> Estimate:
        """Nats per token of plain code that a main model loses by a fault."""
        if drawn.fixture not in self._likely:
            self._likely[drawn.fixture] = _likelihood(self._folders[drawn.fixture])
        return _likelihood(bundle).gain(self._likely[drawn.fixture], CONFIDENCE)

    def _corpus(self, bundle: Path, like: Corpus | None = None) -> Corpus:
        model = load_model(bundle, LoadOptions()).model
        tokenizer = Tokenizer.find(bundle / "main")
        prompts = tuple(tokenizer.encode(text) for text in BUILT_IN)
        return Corpus(model, prompts, TOKENS, given=None if like is None else like.texts)


def _likelihood(bundle: Path) -> Likelihood:
    tokenizer = Tokenizer.find(bundle / "main")
    code = PlainTexts.of_modules(tokenizer, JUDGING, MORE_JUDGING_PASSAGES)
    return Likelihood.of(open_streamed(bundle, "cpu"), code)


def _accepted(corpus: Corpus) -> float:
    drafts = corpus.drafts(2)
    return float(torch.stack(drafts.hit).sum() / torch.stack(drafts.room).sum())


def sentences(context: Context, judges: dict[str, Judge]) -> Iterator[list[str]]:
    """Yield what fails of each check, in words."""
    for name, judge in judges.items():
        found = tuple(judge(context))
        context.note_failures(name, found)
        failed = (item for item in found if item.status is Status.FAIL)
        yield [f"{name}: {item.name}: {item.cause}" for item in failed]


def opened(bundle: Path, source: Path | None = None) -> Context:
    """A bundle to be judged with its source, by files and weights, or without one."""
    level = Level.RUN if source is None else Level.WEIGHTS
    options = VerifyOptions(bundle, source, level, max_new_tokens=TOKENS, ks=(2,))
    return Context.open(options, no_progress)


def verdict_of(drawn: Drawn, context: Context, judges: dict[str, Judge]) -> dict[str, Any]:
    """Judge a fault, check after check until one names it, and that judgement."""
    start, said = time.monotonic(), list[str]()
    for more in sentences(context, judges):
        said += more
        if named(drawn, said, drawn.exact):
            break
    return {"said": said, "seconds": time.monotonic() - start, **names_of(drawn, said)}


def names_of(drawn: Drawn, said: list[str]) -> dict[str, bool]:
    """Return whether a fault is named, and whether exactly so."""
    loose = f"({drawn.exact})|({drawn.loose})"
    return {"named": named(drawn, said, loose), "exactly": named(drawn, said, drawn.exact)}


def named(drawn: Drawn, said: list[str], kind: str) -> bool:
    """True where one sentence names the place and the kind of a fault."""
    sentences = (one for words in said for one in words.split("; "))
    return any(re.search(drawn.place, one) and re.search(kind, one) for one in sentences)


def run(arguments: argparse.Namespace) -> None:
    """Judge the faults that are not judged yet."""
    torch.set_num_threads(1)
    into, first = Path(arguments.into), arguments.first
    into.mkdir(parents=True, exist_ok=True)
    folders = {fixture: _in_bf16(fixture, into / fixture) for fixture in FIXTURES}
    effects, record = Effects(folders), into / "judged.jsonl"
    done = len(record.read_text().splitlines()) if record.exists() else 0
    for number in range(first + done, first + arguments.count):
        drawn = draw(arguments.seed, number, folders)
        found = _found(drawn, folders[drawn.fixture], into, effects)
        with record.open("a") as file:
            file.write(json.dumps(asdict(drawn) | found) + "\n")
    print(counted([json.loads(line) for line in record.read_text().splitlines()]))


def counted(judged: list[dict[str, Any]]) -> str:
    """Return how many faults are caught and named, with a source all, and without those that change
    tokens or acceptance; what quantize refuses to export is caught before, and left out."""
    judged = [one for one in judged if one["done"] != UNCHANGED]
    exported = [one for one in judged if "refused" not in one]
    lines = [f"{len(judged)} drawn, {len(judged) - len(exported)} refused by quantize"]
    for title, key in (("with the source", "with_source"), ("without it", "without")):
        found = [one[key] for one in exported if key in one]
        caught, right, exact = (
            sum(map(bool, (one[what] for one in found))) for what in ("said", "named", "exactly")
        )
        lines.append(f"{title}: {len(found)}, {caught} caught, {right} named, {exact} exactly")
    passed = [one["cost"] for one in exported if "cost" in one and not _caught(one)]
    lines += [f"passed without it, for {Estimate(**one).shown()} nats per token" for one in passed]
    return "\n".join(lines)


def _caught(judged: dict[str, Any]) -> bool:
    """True for what is caught without the source, or changes too little to be judged so."""
    return "without" not in judged or bool(judged["without"]["said"])


def _found(drawn: Drawn, good: Path, into: Path, effects: Effects) -> dict[str, Any]:
    """Plant, export and judge a fault; without the source where it changes tokens or acceptance."""
    planted, bundle = into / "planted", into / "bundle"
    for folder in (planted, bundle):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, planted)
    found: dict[str, Any] = {"done": plant(drawn, planted)}
    if found["done"] == UNCHANGED:
        return found
    tokens, acceptance = effects.of(drawn, planted)
    found |= {"tokens": tokens, "acceptance": acceptance}
    if drawn.part == "main":
        found["cost"] = effects.cost(drawn, planted).as_json()
    base, mtp, *more = ROWS[drawn.row]
    schemes = ("--base-quant", base, "--mtp-quant", mtp, *more)
    outcome = quantize(planted, bundle, *schemes, "--quiet")
    if outcome.code:
        return found | {"refused": outcome.err}
    found["with_source"] = verdict_of(drawn, opened(bundle, good), WITH_SOURCE)
    if max(tokens, abs(acceptance)) > LEAST_CHANGE:
        found["without"] = verdict_of(drawn, opened(bundle), JUDGES)
    return found


def _in_bf16(fixture: str, folder: Path) -> Path:
    if not folder.exists():
        schemes = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--link", "copy", "--quiet")
        assert quantize(ROOT / "fixtures" / fixture, folder, *schemes).code == 0
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--into", required=True)
    run(parser.parse_args())
