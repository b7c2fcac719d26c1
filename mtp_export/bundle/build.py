"""Makes a bundle, OUT/main, OUT/mtp and a manifest, from a plan: what export and quantize share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtp_export import __version__
from mtp_export.bundle.journal import Journal
from mtp_export.bundle.links import guess_links, resolve_links
from mtp_export.bundle.preflight import (
    check_disk,
    check_memory,
    check_output,
    clear_output,
    clear_stale,
    clear_temporaries,
    is_finished,
)
from mtp_export.bundle.run import COPY_BUFFER_BYTES, Job, Means, Proceed, run
from mtp_export.bundle.split import (
    Checksums,
    Part,
    SharedWeights,
    SplitOptions,
    main_part,
    mtp_part,
    shared_pairs,
)
from mtp_export.bundle.tied_weights import PIECE_BYTES, hold_against
from mtp_export.checkpoint.bundle_folder import open_checkpoint
from mtp_export.checkpoint.files import read_failure, write_bytes, write_json
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.manifest import (
    MANIFEST_NAME,
    manifest,
    modification_times,
    source_identity,
)
from mtp_export.checkpoint.plan import COPY, Link, PartPlan, Resources, Step
from mtp_export.checkpoint.reader import CONFIG_NAME, INDEX_NAME, Checkpoint
from mtp_export.checkpoint.tensor_reader import aligned_buffer
from mtp_export.errors import InvalidInputError, OutputExistsError, UnsupportedError
from mtp_export.families.base import ModelFamily
from mtp_export.progress import ProgressCallback
from mtp_export.schemes.discrepancies import compare
from mtp_export.schemes.stored import StoredModel, stored_source
from mtp_export.schemes.transforms import one_torch_thread
from mtp_export.targets import target_of

# Measured resident memory: the program with its headers and plan, and what torch and the compiled
# kernels add when a plan computes.
_BASE_BYTES = 80_000_000
_BYTES_PER_TENSOR = 2_200
_COMPUTING_BYTES = 350_000_000
_LEAST_BUDGET_BYTES = 16_000_000


@dataclass(frozen=True)
class BundleOptions:
    """What to make a bundle of and how. Memory and shard sizes in bytes."""

    input_dir: Path
    output_dir: Path
    part: Part = Part.BOTH
    target: str = "hf"
    shared_weights: SharedWeights = SharedWeights.KEEP
    link: Link = Link.AUTO
    workers: int = 2
    max_memory_bytes: int = 4 << 30
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    resume: bool = True
    allow_untied: bool = False
    checksums: Checksums = Checksums.WRITTEN

    def recorded(self) -> dict[str, Any]:
        """The options that decide what the bundle holds."""
        return {
            "part": str(self.part),
            "target": target_of(self.target).name,
            "shared_weights": str(self.shared_weights),
            "max_shard_bytes": self.max_shard_bytes,
            "allow_untied": self.allow_untied,
            "checksums": str(self.checksums),
        }


@dataclass(frozen=True)
class BundlePlan:
    """A checked checkpoint and what would become of it; nothing is written yet.

    recorded is what the manifest says of the options, device the torch device that computes.
    """

    options: BundleOptions
    checkpoint: Checkpoint
    stored: StoredModel
    parts: tuple[PartPlan, ...]
    recorded: Mapping[str, Any]
    device: str = "cpu"

    @property
    def family(self) -> ModelFamily:
        return self.stored.family

    @property
    def written_bytes(self) -> int:
        return sum(shard.size_bytes for part in self.parts for shard in part.written)

    @property
    def checked_bytes(self) -> int:
        """Bytes of linked shards that are read for their checksums alone."""
        return sum(shard.size_bytes for part in self.parts for shard in part.checked)

    @property
    def written_steps(self) -> tuple[Step, ...]:
        return tuple(step for part in self.parts for shard in part.written for step in shard.steps)

    @property
    def computed_bytes(self) -> int:
        return sum(step.size_bytes for step in self.written_steps if step.operation != COPY)

    @property
    def memory_bytes(self) -> int:
        """Peak resident memory that the run needs at the least."""
        per_worker = _LEAST_BUDGET_BYTES if self.computed_bytes else COPY_BUFFER_BYTES
        return self._base_bytes + self.options.workers * per_worker

    @property
    def budget_bytes(self) -> int:
        """A worker's share of --max-memory."""
        free = self.options.max_memory_bytes - self._base_bytes
        return max(_LEAST_BUDGET_BYTES, free // self.options.workers)

    @property
    def _base_bytes(self) -> int:
        tensors = len(self.checkpoint.tensors)
        computing = _COMPUTING_BYTES if self.computed_bytes else 0
        return _BASE_BYTES + tensors * _BYTES_PER_TENSOR + computing


@dataclass(frozen=True)
class BundleResult:
    """What a finished run did. resumed_shards were found finished by an earlier run; facts are
    what was noted of each tensor that was computed."""

    plan: BundlePlan
    seconds: float
    resumed_shards: int
    facts: Mapping[str, Mapping[str, Any]]


def open_source(folder: Path) -> tuple[Checkpoint, StoredModel]:
    """A checkpoint, or a bundle as one, whose tensors are exactly those its config promises, with
    an MTP layer.

    Raises UnsupportedError for another model or one without MTP layer, InvalidInputError for the
    first tensor that is missing, extra or of another shape or dtype.
    """
    checkpoint = open_checkpoint(folder)
    stored = stored_source(checkpoint.config)
    if not any(stored.family.mtp_layer_of(name) is not None for name in checkpoint.tensors):
        promised = checkpoint.config.get("num_nextn_predict_layers", "no")
        raise UnsupportedError(
            "The checkpoint has no MTP layer",
            where=folder,
            expected="num_nextn_predict_layers of 1 or more in config.json, and tensors of the "
            f"layer after the last (model.layers.{checkpoint.config['num_hidden_layers']}.*)",
            found=f"{promised} num_nextn_predict_layers, and no such tensor",
            todo="Many converted copies lost the layer: start from the original release, and look "
            "with mtp-export inspect",
        )
    problems = compare(checkpoint.tensors, stored.tensors.values())
    if problems:
        problems[0].raise_as_error(folder, len(problems) - 1)
    return checkpoint, stored


def plan_bundle(
    options: BundleOptions,
    source: tuple[Checkpoint, StoredModel],
    split: SplitOptions,
    recorded: Mapping[str, Any],
    *,
    device: str = "cpu",
    dry_run: bool = False,
) -> BundlePlan:
    """Lay out the parts that the options ask for, and refuse what lacks disk or memory.

    Whether linking works is tried (and undone) unless it is a dry run: that guesses, and touches
    nothing.
    """
    checkpoint, stored = source
    shards = [shard.path for shard in checkpoint.shards]
    links = (guess_links if dry_run else resolve_links)(options.link, shards, options.output_dir)
    parts: list[PartPlan] = []
    if options.part in (Part.BOTH, Part.MAIN):
        every = options.checksums is Checksums.ALL
        parts.append(main_part(checkpoint, stored, split).linked_by(links, checked=every))
    if options.part in (Part.BOTH, Part.MTP):
        mtp = mtp_part(checkpoint, stored, split, links)
        parts.append(mtp.linked_by(links, checked=True))
    plan = BundlePlan(options, checkpoint, stored, tuple(parts), recorded, device)
    check_memory(options.max_memory_bytes, plan.memory_bytes)
    check_disk(options.output_dir, plan.written_bytes)
    return plan


def run_bundle(plan: BundlePlan, progress: ProgressCallback) -> BundleResult:
    """Write the bundle that a plan describes, or finish what an earlier run began.

    Raises OutputExistsError, InvalidInputError or IoError; then the output has no manifest. After
    an IoError the same command goes on where it stopped.
    """
    start = time.monotonic()
    output = plan.options.output_dir
    replaces = is_finished(output)
    if replaces and _compares(plan):
        _tied_check(plan, _twins(plan), lambda: None)  # before a good bundle makes way for it
    with Journal(output) as journal:
        _open_journal(plan, journal)
        resumed = len(journal.finished)
        try:
            _write_parts(plan, journal, progress, compare=_compares(plan) and not replaces)
            _check_unchanged(plan.checkpoint)
        except InvalidInputError:
            clear_output(output)  # of a source that is wrong, nothing is worth keeping
            journal.remove()
            raise
        _finish(plan, journal)
    facts = {
        name: noted
        for shard in journal.finished.values()
        for name, noted in shard.get("facts", {}).items()
    }
    return BundleResult(plan, time.monotonic() - start, resumed, facts)


def _open_journal(plan: BundlePlan, journal: Journal) -> None:
    """Take over an earlier run's work, or clear the output and begin.

    The output is looked at again, now that nobody else can change it.
    """
    options, identity = plan.options, _identity(plan)
    try:
        check_output(options.output_dir, options.overwrite)
    except OutputExistsError:
        if journal.is_empty:
            journal.remove()
        raise
    if options.resume and not journal.is_empty:
        try:
            journal.resume(identity)
            clear_temporaries(options.output_dir)
            return
        except OutputExistsError:
            if not options.overwrite:
                raise
    clear_output(options.output_dir)
    journal.begin(identity)


def _identity(plan: BundlePlan) -> dict[str, Any]:
    """What makes two runs the same: the tool, what the options ask for, and the source."""
    links = {
        f"{part.name}/{shard.file_name}": str(shard.link)
        for part in plan.parts
        for shard in part.linked
    }
    return {
        "tool_version": __version__,
        "options": dict(plan.recorded),
        "source": source_identity(plan.checkpoint),
        "modified_ns": modification_times(plan.checkpoint),
        "links": links,
    }


def _compares(plan: BundlePlan) -> bool:
    """Whether the MTP layer's embedding and head must equal the main model's."""
    return not plan.options.allow_untied and any(part.name == "mtp" for part in plan.parts)


def _twins(plan: BundlePlan) -> dict[str, TensorInfo]:
    """The MTP layer's own embedding and head, each with the main model's that it must equal."""
    tensors = plan.checkpoint.tensors
    pairs = shared_pairs(plan.checkpoint, plan.family)
    return {pair.mtp_name: tensors[pair.main_name] for pair in pairs}


def _tied_check(plan: BundlePlan, twins: Mapping[str, TensorInfo], proceed: Proceed) -> None:
    """Compare tensors byte by byte without making anything of them."""
    for name, twin in twins.items():
        buffer = aligned_buffer(PIECE_BYTES)
        hold_against(plan.checkpoint.tensors[name], twin, lambda _: proceed(), buffer)


def _check_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse a source that was written to while it was read (InvalidInputError)."""
    for shard in checkpoint.shards:
        stat = shard.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (shard.size_bytes, shard.modified_ns):
            raise InvalidInputError(
                "The source changed while it was exported",
                where=shard.path,
                todo="Wait until it is whole, then run the same command again",
            )


def _write_parts(
    plan: BundlePlan, journal: Journal, progress: ProgressCallback, compare: bool
) -> None:
    jobs: list[Job] = []
    for part in plan.parts:
        folder = plan.options.output_dir / part.name
        folder.mkdir(exist_ok=True)
        clear_stale(folder, {shard.file_name for shard in part.shards})
        jobs += [Job(f"{part.name}/{shard.file_name}", folder, shard) for shard in part.shards]
    twins = _twins(plan) if compare else {}
    passing = {step.inputs[0] for step in _read_steps(plan) if step.operation == COPY}
    means = Means(
        plan.checkpoint.tensors,
        {name: twin for name, twin in twins.items() if name in passing},
        plan.options.workers,
        Resources(plan.budget_bytes, plan.device),
        progress,
    )
    others = {name: twin for name, twin in twins.items() if name not in passing}
    checks = [partial(_tied_check, plan, others)] if others else []
    with one_torch_thread() if plan.computed_bytes else nullcontext():
        run(jobs, means, journal, checks)


def _read_steps(plan: BundlePlan) -> Iterator[Step]:
    """Whatever passes through the run, to be written or to be checksummed."""
    return (step for part in plan.parts for s in part.shards if s.is_read for step in s.steps)


def _finish(plan: BundlePlan, journal: Journal) -> None:
    """What makes the folders loadable, in the order that never shows a part as whole too early."""
    output = plan.options.output_dir
    for part in plan.parts:
        folder = output / part.name
        for name in part.extra_files:
            (folder / name).parent.mkdir(exist_ok=True)
            write_bytes(folder / name, _read_extra(plan.checkpoint.files_folder / name))
        write_json(folder / INDEX_NAME, part.index())
        write_json(folder / CONFIG_NAME, part.config)
    head = {
        "tool_version": __version__,
        "options": plan.recorded,
        "source": source_identity(plan.checkpoint),
    }
    folders = [(part, output / part.name) for part in plan.parts]
    content = manifest(head, folders, journal.finished, plan.checkpoint)
    write_json(output / MANIFEST_NAME, content)
    journal.remove()


def _read_extra(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_failure(path, error) from error
