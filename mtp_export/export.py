"""Splits a checkpoint into a bundle: OUT/main, OUT/mtp, and a manifest that says what was done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtp_export import __version__
from mtp_export.checkpoint.guard import (
    check_disk,
    check_memory,
    check_nesting,
    check_output,
    clear_output,
    clear_temporaries,
)
from mtp_export.checkpoint.journal import Journal
from mtp_export.checkpoint.links import Link, resolve_link, same_device
from mtp_export.checkpoint.manifest import (
    MANIFEST_NAME,
    manifest,
    modification_times,
    source_identity,
)
from mtp_export.checkpoint.plan import COPY, PartPlan
from mtp_export.checkpoint.reader import CONFIG_NAME, INDEX_NAME, Checkpoint, read_failure
from mtp_export.checkpoint.run import COPY_BUFFER_BYTES, Job, Means, Proceed, run
from mtp_export.checkpoint.same import first_difference
from mtp_export.checkpoint.writer import write_bytes, write_json
from mtp_export.errors import InvalidInputError, UnsupportedError
from mtp_export.families import family_of
from mtp_export.families.base import ModelFamily, SharedTensor, compare
from mtp_export.progress import ProgressCallback
from mtp_export.schemes.transforms import TRANSFORMS
from mtp_export.split import Part, SharedWeights, SplitOptions, main_part, mtp_part, shared_pairs
from mtp_export.targets import target_of

# Measured resident memory: the program with its headers and plan, and what torch and the compiled
# kernels add when a plan computes.
_BASE_BYTES = 80_000_000
_BYTES_PER_TENSOR = 2_200
_COMPUTING_BYTES = 350_000_000
_LEAST_BUDGET_BYTES = 16_000_000
_MOST_BUDGET_BYTES = 512_000_000


@dataclass(frozen=True)
class ExportOptions:
    """What to export and how. Memory and shard sizes in bytes."""

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


@dataclass(frozen=True)
class ExportPlan:
    """A checked checkpoint and what would become of it; nothing is written yet."""

    options: ExportOptions
    checkpoint: Checkpoint
    family: ModelFamily
    parts: tuple[PartPlan, ...]
    link: Link

    @property
    def written_bytes(self) -> int:
        return sum(shard.size_bytes for part in self.parts for shard in part.written)

    @property
    def linked_bytes(self) -> int:
        return sum(shard.size_bytes for part in self.parts for shard in part.linked)

    @property
    def computed_bytes(self) -> int:
        return sum(
            step.size_bytes
            for part in self.parts
            for shard in part.written
            for step in shard.steps
            if step.operation != COPY
        )

    @property
    def memory_bytes(self) -> int:
        """Peak resident memory that the run needs at the least."""
        per_worker = _LEAST_BUDGET_BYTES if self.computed_bytes else COPY_BUFFER_BYTES
        return self._base_bytes + self.options.workers * per_worker

    @property
    def budget_bytes(self) -> int:
        """A worker's share of --max-memory."""
        free = self.options.max_memory_bytes - self._base_bytes
        return min(_MOST_BUDGET_BYTES, max(_LEAST_BUDGET_BYTES, free // self.options.workers))

    @property
    def _base_bytes(self) -> int:
        tensors = len(self.checkpoint.tensors)
        computing = _COMPUTING_BYTES if self.computed_bytes else 0
        return _BASE_BYTES + tensors * _BYTES_PER_TENSOR + computing


@dataclass(frozen=True)
class ExportResult:
    """What a finished export did. resumed_shards were found finished by an earlier run."""

    plan: ExportPlan
    seconds: float
    resumed_shards: int


def open_source(folder: Path) -> tuple[Checkpoint, ModelFamily]:
    """A checkpoint whose tensors are exactly those its config promises, with an MTP layer.

    Raises UnsupportedError for another model or one without MTP layer, InvalidInputError for the
    first tensor that is missing, extra or of another shape or dtype.
    """
    checkpoint = Checkpoint.open(folder)
    family = family_of(checkpoint.config)
    if not any(family.mtp_layer_of(name) is not None for name in checkpoint.tensors):
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
    problems = compare(checkpoint.tensors, family.expected.values())
    if problems:
        problems[0].raise_as_error(folder, len(problems) - 1)
    return checkpoint, family


def plan_export(options: ExportOptions, link: Link | None = None) -> ExportPlan:
    """Check the source and lay out the bundle; raises whatever is wrong, writes nothing.

    Without a resolved way to link, whether linking works is taken from the devices alone.
    """
    target = target_of(options.target)
    check_nesting(options.input_dir, options.output_dir)
    checkpoint, family = open_source(options.input_dir)
    if link is None:
        link = options.link
        if link is Link.AUTO and not same_device(checkpoint.shards[0].path, options.output_dir):
            link = Link.COPY
    split = SplitOptions(
        target, options.shared_weights, options.max_shard_bytes, link is not Link.COPY
    )
    parts: list[PartPlan] = []
    if options.part in (Part.BOTH, Part.MAIN):
        parts.append(main_part(checkpoint, family, split))
    if options.part in (Part.BOTH, Part.MTP):
        parts.append(mtp_part(checkpoint, family, split))
    return ExportPlan(options, checkpoint, family, tuple(parts), link)


def run_export(plan: ExportPlan, progress: ProgressCallback) -> ExportResult:
    """Write the bundle that a plan describes, or finish what an earlier run began.

    Raises ResourceError, OutputExistsError or IoError; then the output has no manifest, and the
    same command goes on where it stopped.
    """
    start = time.monotonic()
    options, output = plan.options, plan.options.output_dir
    check_output(output, options.overwrite)
    check_memory(options.max_memory_bytes, plan.memory_bytes)
    link = resolve_link(options.link, plan.checkpoint.shards[0].path, output)
    if link is not plan.link:
        plan = plan_export(options, link)
    check_disk(output, plan.written_bytes - _present_bytes(plan))
    restart = options.overwrite or not options.resume
    with Journal(output, _identity(plan), restart) as journal:
        if not journal.resumed:
            clear_output(output)
        resumed = len(journal.finished)
        try:
            _write_parts(plan, journal, progress)
        except InvalidInputError:
            clear_output(output)  # of a source that is wrong, nothing is worth keeping
            journal.remove()
            raise
        _finish(plan, journal)
    return ExportResult(plan, time.monotonic() - start, resumed)


def _identity(plan: ExportPlan) -> dict[str, Any]:
    """What makes two runs the same: the tool, what the options ask for, and the source."""
    options = plan.options
    return {
        "tool_version": __version__,
        "options": _recorded_options(options) | {"link": str(plan.link)},
        "source": source_identity(plan.checkpoint),
        "modified_ns": modification_times(plan.checkpoint),
    }


def _recorded_options(options: ExportOptions) -> dict[str, Any]:
    """The options that decide what the bundle holds."""
    return {
        "part": str(options.part),
        "target": target_of(options.target).name,
        "shared_weights": str(options.shared_weights),
        "max_shard_bytes": options.max_shard_bytes,
        "allow_untied": options.allow_untied,
    }


def _present_bytes(plan: ExportPlan) -> int:
    """Bytes that an unfinished or replaced run already takes where this run writes."""
    folder = plan.options.output_dir
    shards = ((part.name, shard) for part in plan.parts for shard in part.written)
    paths = (folder / part / shard.file_name for part, shard in shards)
    return sum(path.stat().st_size for path in paths if path.is_file())


def _tied_check(plan: ExportPlan, proceed: Proceed) -> None:
    """Hold the MTP layer's embedding and head against the main model's, byte by byte."""
    tensors = plan.checkpoint.tensors
    for pair in shared_pairs(plan.checkpoint, plan.family):
        offset = first_difference(tensors[pair.mtp_name], tensors[pair.main_name], proceed)
        if offset is not None:
            _refuse_untied(plan, pair, offset)


def _refuse_untied(plan: ExportPlan, pair: SharedTensor, offset: int) -> None:
    raise InvalidInputError(
        f"The MTP layer's {pair.mtp_name} differs from the main model's {pair.main_name}",
        where=plan.options.input_dir,
        expected="equal bytes: engines use the main model's for both",
        found=f"a difference in the piece at byte {offset}",
        todo="Check that the MTP layer belongs to this model; --allow-untied exports it all the "
        "same, with the layer's own copies",
    )


def _write_parts(plan: ExportPlan, journal: Journal, progress: ProgressCallback) -> None:
    jobs: list[Job] = []
    for part in plan.parts:
        folder = plan.options.output_dir / part.name
        folder.mkdir(exist_ok=True)
        clear_temporaries(folder)
        jobs += [Job(f"{part.name}/{shard.file_name}", folder, shard) for shard in part.shards]
    means = Means(
        plan.checkpoint.tensors,
        TRANSFORMS,
        plan.link,
        plan.options.workers,
        plan.budget_bytes,
        progress,
    )
    needs_check = not plan.options.allow_untied and any(p.name == "mtp" for p in plan.parts)
    run(jobs, means, journal, [partial(_tied_check, plan)] if needs_check else [])


def _finish(plan: ExportPlan, journal: Journal) -> None:
    """What makes the folders loadable, in the order that never shows a part as whole too early."""
    output = plan.options.output_dir
    for part in plan.parts:
        folder = output / part.name
        for name in part.extra_files:
            write_bytes(folder / name, _read_extra(plan.checkpoint.folder / name))
        write_json(folder / INDEX_NAME, part.index())
        write_json(folder / CONFIG_NAME, part.config)
    head = {
        "tool_version": __version__,
        "options": _recorded_options(plan.options),
        "source": source_identity(plan.checkpoint),
    }
    folders = [(part, output / part.name) for part in plan.parts]
    write_json(output / MANIFEST_NAME, manifest(head, folders, journal.finished))
    journal.remove()


def _read_extra(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_failure(path, error) from error
