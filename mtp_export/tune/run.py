"""A tuning run: rows, training, held-out acceptance before and after, and the tuned bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from mtp_checkpoints.errors import UsageError
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.preflight import check_disk
from mtp_export.bundle.run_folder import check_output
from mtp_export.paths import refuse_overlaps
from mtp_export.progress import silent
from mtp_export.tune.draft import TrainedDraft, draft_type
from mtp_export.tune.drafts import DRAFTS
from mtp_export.tune.estimate import output_bytes
from mtp_export.tune.options import TuneOptions, short_hash
from mtp_export.tune.row_store import (
    MEASURING_DTYPE,
    PART_LINES,
    TRAINING_DTYPE,
    Data,
    RowStore,
)
from mtp_export.tune.rows import Rows, Writer
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.tune.training import OnStep, Training
from mtp_export.tune.writing import Output
from mtp_export.verify.evidence.blocks import Blocks, walked
from mtp_runtime.config import MAX_DRAFT_TOKENS
from mtp_runtime.loading.same_files import require_same_files
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.parallel.group import Group
from mtp_runtime.parallel.join import joined
from mtp_runtime.streaming import open_streamed


class Progress(Protocol):
    """Shows how far a run is."""

    def texts(self, count: int) -> Callable[[int], object]:
        """Return what is told the number of texts that were written, of so many."""

    def steps(self, done: int, count: int) -> OnStep:
        """Return what is told of every step of so many."""


class Silent:
    """Progress that is not shown."""

    def texts(self, count: int) -> Callable[[int], object]:
        return lambda done: None

    def steps(self, done: int, count: int) -> OnStep:
        return lambda step, losses: None


@dataclass(frozen=True)
class TuneResult:
    """A finished run; losses are smoothed, by step. cpu_seconds: of the steps, in this process."""

    options: TuneOptions
    before: Measured
    after: Measured
    losses: list[tuple[float, float]]
    rows: int
    cpu_seconds: float


def tune(options: TuneOptions, progress: Progress) -> TuneResult | None:
    """Train a draft, and write the bundle with it; None in all processes but the first.

    An interrupted run goes on where it stopped. Raises MtpExportError.
    """
    source = open_checked(options)
    with joined() as group:
        require_same_files([source.main, source.mtp], group)
        shown = progress if group.is_first else Silent()
        return _Run(options, source, group, progress=shown).finish()


def open_checked(options: TuneOptions) -> SourceBundle:
    """Open the bundle; refuse a draft that is not known or not made for such a model, copies that
    are none, an output that is there or has no room, and folders within each other
    (MtpExportError)."""
    if options.draft not in DRAFTS:
        raise UsageError(
            "There is no draft of this name to train",
            expected=", ".join(DRAFTS),
            found=options.draft,
        )
    if options.train.lora_rank is not None and not draft_type(options.draft).low_rank:
        raise UsageError(
            "A draft from nothing has no weights to change by a low rank",
            expected="--draft mtp with --lora-rank",
            found=f"--draft {options.draft}",
            todo="Leave --lora-rank out",
        )
    data = options.data
    refuse_overlaps(
        {"--bundle": options.bundle, "--data": data.prompts, "--held-out": data.held_out},
        {"--output-dir": options.output_dir, "the work folder": options.work},
    )
    check_output(options.output_dir, options.run)
    source = SourceBundle.open(options.bundle)
    source.check_copies()
    sizes = draft_type(options.draft).sizes(options, source)
    check_disk(options.output_dir, output_bytes(options, source, sizes))
    return source


def row_stores(options: TuneOptions, source: SourceBundle) -> tuple[RowStore, RowStore]:
    """Return the rows to train on and those to measure on, which a run makes where they are
    missing; drafts that are fed the same share them."""
    data = Data.read(options.data, source.main, options.train.seed)
    own, kind = options.data, draft_type(options.draft)
    identity = {
        "bundle": source.digest,
        "lines": data.identity,
        "new_tokens": own.new_tokens,
        "text_tokens": own.text_tokens,
        "stream": options.stream,
        "fed": kind.fed(source),
    }
    folder = options.work / f"rows-{short_hash(identity)}"
    # A target on disk is read once for every part.
    most = len(data.training) + len(data.held_out) if options.stream else PART_LINES
    return (
        RowStore(folder / "training", data.training, TRAINING_DTYPE, part_lines=most),
        RowStore(folder / "held-out", data.held_out, MEASURING_DTYPE, part_lines=most),
    )


@dataclass(frozen=True)
class _Run:
    options: TuneOptions
    source: SourceBundle
    group: Group
    progress: Progress

    def finish(self) -> TuneResult | None:
        """Do all that is left of the run."""
        options, (training_rows, held_out) = self.options, self._stores
        if self.group.is_first:
            self._make_rows((training_rows, held_out))
        self.group.wait()
        draft = draft_type(options.draft).open(options, self.source)
        before = self._measured(draft, held_out)
        training = Training(
            draft=draft,
            options=options.train,
            group=self.group,
            place=options.work / f"training-{self._name}.pt",
            save_seconds=options.save_seconds,
        )
        training.run(training_rows, self.progress.steps(training.done, options.train.steps))
        if before is None or (after := self._measured(draft, held_out)) is None:
            return None
        self._write(draft, before, after)
        return TuneResult(
            options=options,
            before=before,
            after=after,
            losses=training.log.means(),
            rows=sum(training_rows.lengths),
            cpu_seconds=training.cpu_seconds,
        )

    @property
    def _name(self) -> str:
        """Name of all that decides what the training ends with."""
        rows, train = self._stores[0].folder.parent.name, asdict(self.options.train)
        return short_hash({"rows": rows, "draft": self.options.draft, **train})

    @cached_property
    def _stores(self) -> tuple[RowStore, RowStore]:
        return row_stores(self.options, self.source)

    def _make_rows(self, stores: Sequence[RowStore]) -> None:
        """Make the rows that are missing; the target is loaded for them, and dropped."""
        writers: list[Writer] = []

        def writer() -> Writer:
            if not writers:
                writers.append(self._writer())
            return writers[0]

        advance = self.progress.texts(sum(len(store.lines) for store in stores))
        for store in stores:
            store.make(writer, advance)

    def _writer(self) -> Writer:
        options, own, kind = self.options, self.options.data, draft_type(self.options.draft)
        streamed = open_streamed(options.bundle, options.device) if options.stream else None
        if streamed is None:
            model = load_model(options.bundle, LoadOptions(options.device)).model
        else:
            model = streamed.rest()
        return Writer(
            model.tapped(kind.taps(model.config.layers)),
            fed=kind.fed(self.source),
            new_tokens=own.new_tokens,
            text_tokens=own.text_tokens,
            streamed=streamed,
        )

    def _measured(self, draft: TrainedDraft, store: RowStore) -> Measured | None:
        """Measure acceptance, in the first process alone."""
        return Measured.of(draft, Rows.joined(store.parts)) if self.group.is_first else None

    def _write(self, draft: TrainedDraft, before: Measured, after: Measured) -> None:
        """Write the bundle with the trained weights."""
        options = self.options
        facts = {
            **asdict(options.train),
            "before": before.as_json(),
            "after": after.as_json(),
        }
        folder = options.work / f"trained-{self._name}"
        run_bundle(draft.plan(Output(options, self.source, folder, facts)), silent)


@dataclass(frozen=True)
class Measured:
    """Blocks of drafts by the number of drafts of a step."""

    blocks: Mapping[int, Blocks]

    @classmethod
    def of(cls, draft: TrainedDraft, rows: Rows) -> Measured:
        """Measure every number of drafts that the draft can make."""
        drafts, anchors = draft.judged(rows, MAX_DRAFT_TOKENS), rows.texts.anchors()
        ks = range(1, len(drafts.hit) + 1)
        return cls({k: walked(rows.texts, anchors, drafts=drafts, k=k) for k in ks})

    def as_json(self) -> dict[str, Any]:
        """Return the estimates with their intervals; None where nothing was drafted."""
        return {
            f"k={k}": {
                "acceptance": [None if e is None else e.as_json() for e in blocks.conditional],
                "tokens_per_step": None if (e := blocks.tokens_per_step) is None else e.as_json(),
            }
            for k, blocks in self.blocks.items()
        }
