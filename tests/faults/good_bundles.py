"""Good bundles of the trained fixtures in every row of the precision table and for every target,
with drafts of other kinds and without, judged as the faults of `blind` are: whatever fails is a
false alarm.

python -m faults.good_bundles --seeds 20 --into FOLDER   (with tests/ on the path; too long for the
test suite). Files and weights of a bundle are judged once, with its source and without, and so is
plain text; what prompts change, once per seed of them. A bundle is loaded once, and the prompts of
some seeds are decoded together. Of bundles that hold the same numbers, as those for two targets,
one is run for all. FOLDER/judged.jsonl has one line for each; a run goes on behind what it has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cases import SAFETENSORS_TARGETS, export, quantize
from faults.blind import JUDGES, ROOT, TOKENS, WITH_SOURCE, opened, sentences
from faults.drawn_faults import FIXTURES
from faults.fitted_drafts import write_fitted_eagle3, write_fitted_heads
from faults.small_model import ROWS
from faults.sweep import prompts_of
from mtp_export.verify.check import Item, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import acceptance, controls
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.weights import load_report
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, open_model

RELEASED = "released"
# Rows that the runtime runs, and one more pair. Those of w4afp8 have one scale per 128 weights,
# more than an expert's.
SCHEMES: dict[str, tuple[str, ...]] = {
    **{row: own for row, own in ROWS.items() if row != "w4afp8" and "GGUF" not in row},
    "nvfp4 with fp8": ("weight_only_nvfp4", "a8w8_fp8"),
}
PAIRS = [RELEASED, *SCHEMES]
DRAFTS = {"parallel_heads": write_fitted_heads, "eagle3": write_fitted_eagle3}
_LATENT = "deepseek-v3-tiny"  # whose attention the fitted EAGLE-3 draft has
OF_FILES, OF_TEXT = ("files", "ledger"), ("likelihood",)
# Beside the numbers of seeds, and None for a bundle by itself.
TEXT = "plain text"
Seed = int | str | None
_PROMPTS = 16
_SEEDS_AT_ONCE = 4  # whose prompts are decoded together, in the memory of a cache


@dataclass(frozen=True)
class Bundle:
    """A fixture in a row of the table, for a target, and the kind of draft beside it."""

    fixture: str
    row: str
    target: str
    draft: str = ""

    @property
    def name(self) -> str:
        beside = f", {self.draft}" if self.draft else ""
        return f"{self.fixture}, {self.row} for {self.target}{beside}"

    def made(self, folder: Path) -> str:
        """Write it; return why its row or target refuses the fixture, "" where it does not."""
        shutil.rmtree(folder, ignore_errors=True)
        source = ROOT / "fixtures" / self.fixture
        usual = ("--target", self.target, "--link", "copy", "--quiet")
        if self.row == RELEASED:
            outcome = export(source, folder, *usual)
        else:
            base, mtp, *more = SCHEMES[self.row]
            schemes = ("--base-quant", base, "--mtp-quant", mtp, *more)
            outcome = quantize(source, folder, *schemes, *usual)
        return outcome.err if outcome.code else ""


def bundles() -> list[Bundle]:
    """Every row of every fixture for every target, or the one that it is for, and with a draft of
    each other kind."""
    rows = {row: _targets_of(row) for row in PAIRS}
    return [
        Bundle(fixture, row, target, draft)
        for fixture in FIXTURES  # the one of most layers last
        for row, targets in rows.items()
        for target, draft in (
            *((target, "") for target in targets),
            *((targets[0], draft) for draft in DRAFTS if fixture == _LATENT or draft != "eagle3"),
        )
    ]


def first_seeds(found: Iterable[Bundle]) -> dict[Bundle, int]:
    """The seed, to be taken modulo their number, that each bundle is judged on first: one that is
    like it for another target begins with the same."""
    kinds: dict[Bundle, int] = {}
    return {one: kinds.setdefault(replace(one, target=""), len(kinds)) for one in found}


def _targets_of(row: str) -> tuple[str, ...]:
    options = SCHEMES.get(row, ())
    if "--target" not in options:
        return SAFETENSORS_TARGETS
    return (options[options.index("--target") + 1],)


def numbers_of(folder: Path) -> str:
    """Mark of the numbers that a bundle runs with: its main part, its MTP modules as they are
    loaded, and its other drafts."""
    digest = hashlib.sha256()
    others = (path for name in DRAFTS for path in folder.glob(f"{name}/*"))
    for path in sorted([*folder.glob("main/*.safetensors"), folder / "main/config.json", *others]):
        digest.update(path.read_bytes())
    modules = open_model(folder, LoadOptions()).model(TorchExecution(), layers=0).mtp_modules
    digest.update(repr([module.contract for module in modules]).encode())
    for tensor in _tensors(modules):
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(part: object) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple):
        yield from chain.from_iterable(map(_tensors, part))
    elif is_dataclass(part):
        yield from chain.from_iterable(_tensors(getattr(part, one.name)) for one in fields(part))


def judged_alone(bundle: Bundle, folder: Path) -> Iterator[str]:
    """Yield what fails whatever the prompts: with the source, then without."""
    with_source = opened(folder, ROOT / "fixtures" / bundle.fixture)
    for said in sentences(with_source, WITH_SOURCE):
        yield from said
    yield from judged_by(OF_FILES, opened(folder))
    if bundle.draft:
        yield from _failed("drafts", load_report.extra_drafts(opened(folder)))


def judged_by(names: Iterable[str], context: Context) -> Iterator[str]:
    """Yield what fails of some of the judges."""
    for said in sentences(context, {name: JUDGES[name] for name in names}):
        yield from said


def corpora(context: Context, seeds: Sequence[int]) -> Iterator[tuple[int, Corpus]]:
    """Yield the texts of each seed, all of which are decoded and run together."""
    model = context.loaded(LoadOptions()).model
    each = [prompts_of(seed, _PROMPTS) for seed in seeds]
    by_turns = tuple(prompt for one in zip(*each, strict=True) for prompt in one)
    together = Corpus(model, by_turns, TOKENS)
    for place, seed in enumerate(seeds):
        yield seed, together.every_nth(len(seeds), first=place)


def judged_on(corpus: Corpus, context: Context) -> Iterator[str]:
    """Yield what fails on the texts of a seed."""
    yield from _failed("acceptance", acceptance.diagnosed(corpus, context=context))
    yield from _failed("controls", controls.items_of(corpus))
    for extra in context.extra_drafts:
        yield from _failed("drafts", [acceptance._extra_diagnosed(corpus, extra)])


def _failed(check: str, items: Iterable[Item]) -> list[str]:
    return [f"{check}: {i.name}: {i.cause}" for i in items if i.status is Status.FAIL]


@dataclass(frozen=True)
class Record:
    """Judgements, a line for each bundle by itself and for each of its seeds."""

    file: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def add(self, bundle: Bundle, **found: object) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"bundle": bundle.name, **found}) + "\n")

    def missing(self, bundle: Bundle, seeds: Sequence[int]) -> list[Seed]:
        """Return the seeds that a bundle was not judged on, None for itself; none of one that is
        refused. Those on which another one with the same numbers was judged are taken from that."""
        own = [line for line in self.lines if line["bundle"] == bundle.name]
        if any("refused" in line for line in own):
            return []
        done, wanted = {line["seed"] for line in own}, (TEXT, *seeds)
        numbers = {line["numbers"] for line in own}
        for line in self.lines if numbers else []:
            seed = line.get("seed")
            if line.get("numbers") in numbers and seed not in done and seed in wanted:
                self.add(bundle, **{"as": line.pop("bundle"), **line})
                done.add(seed)
        return [seed for seed in (None, *wanted) if seed not in done]

    def counted(self) -> str:
        """Return how much was judged, and each false alarm."""
        judged = [line for line in self.lines if "refused" not in line]
        of_bundles = [line for line in judged if line["seed"] is None]
        of_text = [line for line in judged if line["seed"] == TEXT]
        of_seeds = [line for line in judged if isinstance(line["seed"], int)]
        taken = sum("as" in line for line in of_seeds)
        alarms = [f"{o['bundle']}, seed {o['seed']}: {said}" for o in judged for said in o["said"]]
        seconds = sum(line["seconds"] for line in judged if "as" not in line)
        words = f"{len(of_bundles)} bundles by themselves, {len(of_text)} by plain text"
        words += f", {len(of_seeds)} bundles x seeds ({taken} with the numbers of another)"
        return "\n".join([f"{words}, {seconds:.0f} s, {len(alarms)} false alarms", *alarms])


def judge(bundle: Bundle, seeds: Sequence[int], folder: Path, record: Record) -> None:
    """Make a bundle of which anything is missing, and judge that."""
    missing = record.missing(bundle, seeds)
    if not missing:
        return
    if refused := bundle.made(folder):
        record.add(bundle, refused=refused)
        return
    context = opened(folder)
    if bundle.draft:
        (_, corpus), *_ = corpora(context, [0])
        DRAFTS[bundle.draft](folder / bundle.draft, corpus)
    numbers, start = numbers_of(folder), time.monotonic()
    if None in missing:
        said = list(judged_alone(bundle, folder))
        seconds = time.monotonic() - start
        record.add(bundle, seed=None, said=said, seconds=seconds, numbers=numbers)
        missing = record.missing(bundle, seeds)
    start = time.monotonic()
    if TEXT in missing:
        said, seconds = list(judged_by(OF_TEXT, context)), time.monotonic() - start
        record.add(bundle, seed=TEXT, said=said, seconds=seconds, numbers=numbers)
    start, numbered = time.monotonic(), [seed for seed in missing if isinstance(seed, int)]
    for first in range(0, len(numbered), _SEEDS_AT_ONCE):
        for seed, corpus in corpora(context, numbered[first : first + _SEEDS_AT_ONCE]):
            said, seconds = list(judged_on(corpus, context)), time.monotonic() - start
            record.add(bundle, seed=seed, said=said, seconds=seconds, numbers=numbers)
            start = time.monotonic()


def run(arguments: argparse.Namespace) -> None:
    """Judge what is not judged yet, all bundles on a few seeds first."""
    torch.set_num_threads(1)
    into: Path = arguments.into
    into.mkdir(parents=True, exist_ok=True)
    record, seeds = Record(into / "judged.jsonl"), arguments.seeds
    for most in (*range(min(1, seeds), seeds, _SEEDS_AT_ONCE), seeds):
        for bundle, first in first_seeds(bundles()).items():
            some = [(first + more) % seeds for more in range(most)]
            judge(bundle, some, into / "bundle", record)
    print(record.counted())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--into", type=Path, required=True)
    run(parser.parse_args())
