"""Plan and run of a bundle (OUT/main, OUT/mtp and a manifest): the half that export and quantize
share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mtp_export import __version__
from mtp_export.bundle.downloads import (
    CHECKS,
    REMOTE_BYTES,
    Downloads,
    opened_inputs,
    plan_downloads,
    tensors_read,
)
from mtp_export.bundle.journal import Journal, journaled_files
from mtp_export.bundle.links import existing_parent, guess_links, resolve_links
from mtp_export.bundle.manifest import manifest, shard_versions, source_identity
from mtp_export.bundle.options import BundleOptions, Checksums, Part
from mtp_export.bundle.own_files import check_own, clear, manifest_files
from mtp_export.bundle.preflight import check_disk, check_memory, check_output, is_finished
from mtp_export.bundle.run import RunResources, ShardJob, is_made, run
from mtp_export.bundle.split import SplitOptions, main_part, mtp_part
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.checkpoint.bundle_folder import MTP, open_checkpoint
from mtp_export.checkpoint.byte_source import Place
from mtp_export.checkpoint.disk_queue import DiskQueue, disk_depth
from mtp_export.checkpoint.files import make_folder, write_bytes, write_json
from mtp_export.checkpoint.manifest import MANIFEST_NAME
from mtp_export.checkpoint.plan import COPY, PartPlan, Resources, Step
from mtp_export.checkpoint.reader import CONFIG_NAME, INDEX_NAME, Checkpoint
from mtp_export.checkpoint.staging import remove_downloads
from mtp_export.errors import InvalidInputError, OutputExistsError, UnsupportedError
from mtp_export.families.base import ModelFamily
from mtp_export.progress import ProgressCallback
from mtp_export.schemes.discrepancies import compare
from mtp_export.schemes.stored import StoredModel, stored_source
from mtp_export.schemes.transforms import one_torch_thread

# Measured resident memory: the program with its headers and plan, and what torch and the compiled
# kernels add when a plan computes.
_BASE_BYTES = 80_000_000
_BYTES_PER_TENSOR = 2_200
_COMPUTING_BYTES = 350_000_000
_MIN_BUDGET_BYTES = 16_000_000


@dataclass(frozen=True)
class Recipe:
    """Split of the tensors with their conversions, the options as the manifest keeps them, and the
    torch device of conversions that compute."""

    split: SplitOptions
    recorded: Mapping[str, Any]
    device: str = "cpu"


@dataclass(frozen=True)
class BundlePlan:
    """A checked checkpoint and the parts to make of it; nothing is written yet.

    recorded are the options as the manifest keeps them, device the torch device that computes.
    """

    options: BundleOptions
    checkpoint: Checkpoint
    stored: StoredModel
    parts: tuple[PartPlan, ...]
    recorded: Mapping[str, Any]
    device: str = "cpu"

    @property
    def files(self) -> frozenset[str]:
        """Files of the parts, as paths below the output."""
        return frozenset(f"{part.name}/{name}" for part in self.parts for name in part.file_names)

    @property
    def family(self) -> ModelFamily:
        """Family of the source."""
        return self.stored.family

    @property
    def written_bytes(self) -> int:
        """Bytes of the tensors that are written."""
        return sum(shard.size_bytes for part in self.parts for shard in part.written)

    @property
    def checked_bytes(self) -> int:
        """Bytes of linked shards that are read for their checksums alone."""
        return sum(shard.size_bytes for part in self.parts for shard in part.checked)

    @property
    def written_steps(self) -> tuple[Step, ...]:
        """Steps whose outputs are written, in order."""
        return tuple(step for part in self.parts for shard in part.written for step in shard.steps)

    @property
    def computed_bytes(self) -> int:
        """Bytes of the tensors that are not plain copies."""
        return sum(step.size_bytes for step in self.written_steps if step.operation != COPY)

    @cached_property
    def tied(self) -> TiedCopies:
        """Copies of the MTP part that must equal the main model's tensors."""
        if self.options.content.allow_untied or all(part.name != MTP for part in self.parts):
            return TiedCopies.nothing(self.stored)
        return TiedCopies.of(self.checkpoint, self.stored)

    @cached_property
    def downloads(self) -> Downloads | None:
        """Bytes to download from a remote source; None for a local one."""
        reads = tensors_read(self.parts, self.checkpoint.tensors, self.tied)
        return plan_downloads(self.checkpoint, reads)

    @property
    def disk_bytes(self) -> int:
        """Bytes of tensors and downloads on disk at the run's peak."""
        if self.downloads is None:
            return self.written_bytes
        # Beside those that workers are at, a next one is read ahead.
        jobs, readers = self.options.run.workers + 1, self.checkpoint.readers
        return self.written_bytes + self.downloads.disk_bytes(jobs, readers)

    @property
    def memory_bytes(self) -> int:
        """Minimum of the resident memory that the run needs at its peak."""
        return self._memory_bytes(io_depth=1)

    @cached_property
    def io_depth(self) -> int:
        """Reads, and writes, under way at once: as many as asked for, or as keep the disks busy,
        and fit into --max-memory."""
        run = self.options.run
        places = [self.options.output_dir, self.options.input_dir]
        folders = [existing_parent(place) for place in places if isinstance(place, Path)]
        wanted = run.io_depth or max(map(disk_depth, folders))
        fitting = (n for n in range(wanted, 1, -1) if self._memory_bytes(n) <= run.max_memory_bytes)
        return next(fitting, 1)

    @property
    def budget_bytes(self) -> int:
        """Memory of one worker's transform, by --max-memory."""
        workers = self.options.run.workers
        base = self._base_bytes + DiskQueue.memory_bytes(self.io_depth, workers)
        return max(_MIN_BUDGET_BYTES, (self.options.run.max_memory_bytes - base) // workers)

    def _memory_bytes(self, io_depth: int) -> int:
        workers = self.options.run.workers
        computing = workers * _MIN_BUDGET_BYTES if self.computed_bytes else 0
        return self._base_bytes + DiskQueue.memory_bytes(io_depth, workers) + computing

    @property
    def _base_bytes(self) -> int:
        tensors = len(self.checkpoint.tensors)
        computing = _COMPUTING_BYTES if self.computed_bytes else 0
        remote = 0 if self.downloads is None else REMOTE_BYTES
        return _BASE_BYTES + tensors * _BYTES_PER_TENSOR + computing + remote


@dataclass(frozen=True)
class BundleResult:
    """A finished run. resumed_shards were finished by an earlier run; facts are those that the
    transforms returned, by tensor."""

    plan: BundlePlan
    seconds: float
    resumed_shards: int
    facts: Mapping[str, Mapping[str, Any]]


def open_source(place: Place) -> tuple[Checkpoint, StoredModel]:
    """Open a checkpoint, or a bundle as one, with an MTP layer and exactly the tensors that its
    config implies.

    Raises UnsupportedError for another model or one without MTP layer, InvalidInputError for the
    first tensor that is missing, extra or of another shape or dtype.
    """
    checkpoint = open_checkpoint(place)
    stored = stored_source(checkpoint.config)
    # The MTP layer comes last, as a rule.
    if not any(stored.family.mtp_layer_of(n) is not None for n in reversed(checkpoint.tensors)):
        layers = checkpoint.config.get("num_nextn_predict_layers", "no")
        raise UnsupportedError(
            "The checkpoint has no MTP layer",
            where=place,
            expected="num_nextn_predict_layers of 1 or more in config.json, and tensors of the "
            f"layer after the last (model.layers.{checkpoint.config['num_hidden_layers']}.*)",
            found=f"{layers} num_nextn_predict_layers, and no such tensor",
            todo="Many converted copies lack the layer: start from the original release, and check "
            "with mtp-export inspect",
        )
    problems = compare(checkpoint.tensors, stored.tensors.values())
    if problems:
        problems[0].raise_as_error(place, len(problems) - 1)
    return checkpoint, stored


def plan_bundle(
    options: BundleOptions,
    source: tuple[Checkpoint, StoredModel],
    recipe: Recipe,
    *,
    dry_run: bool = False,
) -> BundlePlan:
    """Plan the parts that the options ask for; refuse a run that lacks disk or memory.

    Linking is tried, and undone, to know whether it works; a dry run guesses instead and touches
    nothing.
    """
    checkpoint, stored = source
    split = recipe.split
    shards = [shard.path for shard in checkpoint.shards]
    links = (guess_links if dry_run else resolve_links)(
        options.run.link, shards, options.output_dir
    )
    parts: list[PartPlan] = []
    if options.content.part in (Part.BOTH, Part.MAIN):
        every = options.content.checksums is Checksums.ALL
        parts.append(main_part(checkpoint, stored, split).linked_by(links, checked=every))
    if options.content.part in (Part.BOTH, Part.MTP):
        mtp = mtp_part(checkpoint, stored, options=split, links=links)
        parts.append(mtp.linked_by(links, checked=True))
    plan = BundlePlan(
        options=options,
        checkpoint=checkpoint,
        stored=stored,
        parts=tuple(parts),
        recorded=recipe.recorded,
        device=recipe.device,
    )
    check_memory(options.run.max_memory_bytes, plan.memory_bytes)
    check_disk(options.output_dir, plan.disk_bytes)
    return plan


def run_bundle(plan: BundlePlan, progress: ProgressCallback) -> BundleResult:
    """Write the bundle that a plan describes, or finish what an earlier run began.

    Raises OutputExistsError, InvalidInputError or IoError; then the output has no manifest. After
    an IoError the same command goes on where it stopped.
    """
    start = time.monotonic()
    output = plan.options.output_dir
    replaces = is_finished(output)
    if replaces:  # before a good bundle is removed for it
        with DiskQueue(plan.io_depth) as queue:
            plan.tied.compare(plan.checkpoint.tensors, plan.tied.alike, queue, lambda: None)
    with Journal(output) as journal:
        _open_journal(plan, journal)
        resumed = len(journal.finished)
        try:
            _write_parts(plan, journal, progress, compare=not replaces)
            _check_unchanged(plan.checkpoint)
        except InvalidInputError:
            remove_downloads(output)
            clear(output, journal.files)  # nothing made of a wrong source is worth keeping
            journal.remove()
            raise
        _finish(plan, journal)
    facts = {
        name: noted for shard in journal.finished.values() for name, noted in shard.facts.items()
    }
    seconds = time.monotonic() - start
    return BundleResult(plan=plan, seconds=seconds, resumed_shards=resumed, facts=facts)


def _open_journal(plan: BundlePlan, journal: Journal) -> None:
    """Resume an earlier run, or begin; then clear the output of what is not finished.

    The output is checked again, now that no other run can change it.
    """
    output, identity = plan.options.output_dir, _identity(plan)
    try:
        check_output(output, plan.options.run.overwrite)
        resumes = _resume(plan, journal, identity)
        own = plan.files | manifest_files(output) | journaled_files(output)
        check_own(output, own)
    except OutputExistsError:
        if journal.is_empty:
            journal.remove()
        raise
    if not resumes:
        journal.begin(identity, own)
        remove_downloads(output)
    clear(output, own, kept=journal.finished.keys())


def _resume(plan: BundlePlan, journal: Journal, identity: Mapping[str, Any]) -> bool:
    """Return whether the journal goes on; raises what Journal.resume does."""
    if journal.is_empty or not plan.options.run.resume:
        return False
    try:
        journal.resume(identity)
    except OutputExistsError:
        if not plan.options.run.overwrite:
            raise
        return False
    return True


def _identity(plan: BundlePlan) -> dict[str, Any]:
    """Return what two runs must have in common for one to resume the other."""
    links = {
        f"{part.name}/{shard.file_name}": str(shard.link)
        for part in plan.parts
        for shard in part.linked
    }
    return {
        "tool_version": __version__,
        "options": dict(plan.recorded),
        "source": source_identity(plan.checkpoint),
        "versions": shard_versions(plan.checkpoint),
        "links": links,
    }


def _check_unchanged(checkpoint: Checkpoint) -> None:
    """Refuse a source that was written to while it was read (InvalidInputError)."""
    for shard in checkpoint.shards:
        with closing(shard.file.open()) as file:
            found = file.size_bytes, file.version
        if found != (shard.size_bytes, shard.version):
            raise InvalidInputError(
                "The source changed while it was exported",
                where=shard.path,
                todo="Wait until nothing writes it any more, then run the same command again",
            )


def _write_parts(
    plan: BundlePlan, journal: Journal, progress: ProgressCallback, *, compare: bool
) -> None:
    jobs: list[ShardJob] = []
    for part in plan.parts:
        folder = plan.options.output_dir / part.name
        make_folder(folder)
        jobs += [ShardJob(f"{part.name}/{shard.file_name}", folder, shard) for shard in part.shards]
    made = {job.key for job in jobs if is_made(job, journal)}
    progress(sum(job.shard.size_bytes for job in jobs if job.key in made and job.shard.is_read))
    jobs = [job for job in jobs if job.key not in made]
    tied = plan.tied if compare else TiedCopies.nothing(plan.stored)
    copied = {step.inputs[0] for step in _read_steps(plan) if step.operation == COPY}
    apart = tied.alike.keys() - copied
    keys = {*(job.key for job in jobs), CHECKS}
    with (
        DiskQueue(plan.io_depth) as queue,
        opened_inputs(plan.checkpoint, plan.downloads, plan.options.output_dir, keys) as inputs,
    ):
        tensors = inputs.tensors
        resources = RunResources(
            inputs=inputs,
            tied={own: tensors[main] for own, main in tied.alike.items() if own in copied},
            workers=plan.options.run.workers,
            queue=queue,
            transform=Resources(plan.budget_bytes, plan.device),
            progress=progress,
        )
        checks = [partial(tied.compare, tensors, apart, queue)] if apart or tied.unlike else []
        with one_torch_thread() if plan.computed_bytes else nullcontext():
            run(jobs=jobs, journal=journal, resources=resources, checks=checks)


def _read_steps(plan: BundlePlan) -> Iterator[Step]:
    """Yield the steps whose inputs are read, to be written or only checksummed."""
    return (step for part in plan.parts for s in part.shards if s.is_read for step in s.steps)


def _finish(plan: BundlePlan, journal: Journal) -> None:
    """Write the files beside the shards and end the run with the manifest.

    Configs come after all that may fail: no loader can take an unfinished part for whole.
    """
    output = plan.options.output_dir
    for part in plan.parts:
        folder = output / part.name
        for name in part.extra_files:
            make_folder((folder / name).parent)
            write_bytes(folder / name, plan.checkpoint.files.read(name))
        write_json(folder / INDEX_NAME, part.index())
    for part in plan.parts:
        write_json(output / part.name / CONFIG_NAME, part.config)
    downloads = plan.downloads
    verified = {} if downloads is None else {"verified_shards": list(downloads.verified_shards)}
    head = {
        "tool_version": __version__,
        "options": plan.recorded,
        "source": source_identity(plan.checkpoint) | verified,
    }
    folders = [(part, output / part.name) for part in plan.parts]
    content = manifest(head=head, parts=folders, finished=journal.finished, source=plan.checkpoint)
    write_json(output / MANIFEST_NAME, content)
    journal.remove()
