"""Run of a bundle's plan (OUT/main, OUT/mtp and a manifest): its shards, here or elsewhere, then
the files that make it whole. A share makes some shards, and leaves the rest to the end of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers import GGUF
from mtp_checkpoints.containers.base import CONFIG_NAME, TensorInfo
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.files import make_folder, write_bytes, write_json
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.manifest import MAIN_IDENTITY, MANIFEST_NAME
from mtp_checkpoints.tensors.model_identity import (
    model_identity,
    record_main_identity,
    with_main_identity,
)
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export import __version__
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import CHECKS, opened_inputs
from mtp_export.bundle.journal import ShardFacts
from mtp_export.bundle.manifest import manifest, source_identity
from mtp_export.bundle.run import Record, RunResources, ShardJob, is_made, run
from mtp_export.bundle.run_folder import RunFolder, is_finished
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.plan import COPY, OutputShard, PartPlan, Resources
from mtp_export.progress import ProgressCallback


@dataclass(frozen=True)
class BundleResult:
    """A finished run. resumed_shards were finished by an earlier run; facts are those that the
    transforms returned, by tensor; shares are the runs that did the work, if it was divided."""

    plan: BundlePlan
    seconds: float
    resumed_shards: int
    facts: Mapping[str, Mapping[str, Any]]
    shares: int | None = None


@dataclass(frozen=True)
class Work:
    """Shards that one process makes.

    room is the folder of its downloads. tied are the copies that are compared as they are copied;
    checks: those that no shard copies are compared too.
    """

    jobs: Sequence[ShardJob]
    room: Path
    tied: TiedCopies
    checks: bool = True


# Makes the shards of a work, as make_shards does.
Maker = Callable[[BundlePlan, Work, Record, ProgressCallback], None]


def run_bundle(
    plan: BundlePlan, progress: ProgressCallback, make: Maker | None = None
) -> BundleResult:
    """Write the bundle that a plan describes, or make the shards of the share that its options ask
    for; what an earlier run finished is kept. make is what makes the shards: make_shards, or
    elsewhere.

    Raises OutputExistsError, InvalidInputError or IoError; then the output has no manifest. After
    an IoError the same command goes on where it stopped.
    """
    start, share, tied = time.monotonic(), plan.options.run.share, plan.tied
    if share is None and is_finished(plan.options.output_dir):
        with DiskQueue(plan.io_depth) as queue:  # before a good bundle is removed for it
            tied.compare(plan.checkpoint.tensors, tied.alike, queue, lambda: None)
        tied = TiedCopies.nothing(plan.stored)
    with RunFolder(plan) as folder:
        folder.begin()
        resumed = len(folder.finished.keys() - {CHECKS})
        jobs = jobs_left(plan.share_jobs, folder.finished, progress)
        work = Work(jobs, folder.room, tied, checks=share is None or share.number == 1)
        try:
            (make or make_shards)(plan, work, folder.record, progress)
            check_unchanged(plan.checkpoint)
        except InvalidInputError:
            folder.discard()
            raise
        if share is None:
            write_rest(plan, folder.finished)
            folder.remove()
        else:
            folder.record(CHECKS, ShardFacts(0))
        facts = facts_of(folder.finished)
    return BundleResult(plan, time.monotonic() - start, resumed, facts)


def jobs_left(
    jobs: Sequence[ShardJob], finished: Mapping[str, ShardFacts], progress: ProgressCallback
) -> list[ShardJob]:
    """Return the shards that are still to be made; progress is told the bytes of the others."""
    made = {job.key for job in jobs if is_made(job, finished)}
    progress(sum(job.read_bytes for job in jobs if job.key in made))
    return [job for job in jobs if job.key not in made]


def facts_of(finished: Mapping[str, ShardFacts]) -> dict[str, Mapping[str, Any]]:
    """Return what the transforms of the main and the MTP part returned, by tensor; a draft in a
    folder of its own may have the same names."""
    own = (shard for key, shard in finished.items() if key.partition("/")[0] in (MAIN, MTP))
    return {name: noted for shard in own for name, noted in shard.facts.items()}


def make_shards(plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback) -> None:
    """Make the shards of a work; record is given the facts of each that is finished.

    Raises InvalidInputError for a source that differs from what its plan promises, or IoError.
    """
    for folder in {job.folder for job in work.jobs}:
        make_folder(folder)
    copied = {step.inputs[0] for step in plan.read_steps if step.operation == COPY}
    tied, apart = work.tied, work.tied.alike.keys() - copied
    keys = {*(job.key for job in work.jobs), *([CHECKS] if work.checks else ())}
    with (
        DiskQueue(plan.io_depth) as queue,
        opened_inputs(plan.checkpoint, plan.downloads, work.room, keys) as inputs,
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
        wanted = work.checks and (apart or tied.unlike)
        checks = [partial(tied.compare, tensors, apart, queue)] if wanted else []
        run(jobs=work.jobs, record=record, resources=resources, checks=checks)


def check_unchanged(checkpoint: Checkpoint) -> None:
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


def main_identity(plan: BundlePlan) -> str | None:
    """Return the identity of the main model that the MTP part belongs to: of the main part, whose
    shards are finished, else of the source's. None where the source's is to be converted."""
    part = next((part for part in plan.parts if part.name == MAIN), None)
    if part is None:
        return model_identity(plan.main_tensors) if plan.main_tensors else None
    folder = LocalFolder(plan.options.output_dir / MAIN)
    return model_identity(tensor for shard in part.shards for tensor in _stored(shard, folder))


def _stored(shard: OutputShard, folder: LocalFolder) -> list[TensorInfo]:
    """Return the tensors of a finished shard in its folder."""
    file = folder.file(shard.file_name)
    if shard.linked_from is not None:
        return [tensor._replace(file=file) for tensor in shard.linked_from.tensors]
    places = shard.layout().places
    return [
        TensorInfo(own.name, own.dtype, own.shape, file, places[own.name].start, own.size_bytes)
        for own in shard.tensors
    ]


def write_beside(plan: BundlePlan, main: str | None = None) -> None:
    """Write the files beside the shards, but for the manifest; main is the identity of the main
    model, which the MTP part records.

    Configs come after all that may fail: no loader can take an unfinished part for whole.
    """
    output = plan.options.output_dir
    for part in plan.parts:
        write_files(plan, part, output / part.name, main if part.name == MTP else None)
    for part in plan.parts:
        write_json(output / part.name / CONFIG_NAME, part.config)


def write_files(plan: BundlePlan, part: PartPlan, folder: Path, main: str | None = None) -> None:
    """Write the files beside the shards of one part, which are there, but for its config; main as
    write_beside."""
    make_folder(folder)
    files = part.files or plan.checkpoint.files
    for name in part.extra_files:
        make_folder((folder / name).parent)
        write_bytes(folder / name, files.read(name))
    for name in part.index_names:
        index = part.index()
        write_json(folder / name, index if main is None else with_main_identity(index, main))
    if main is not None and part.container.name == GGUF.name:
        first = part.shards[0]
        record_main_identity(folder / first.file_name, first.layout().head, main)


def write_rest(plan: BundlePlan, finished: Mapping[str, ShardFacts]) -> None:
    """Write the files beside the shards, and last the manifest."""
    main = main_identity(plan)
    write_beside(plan, main)
    output = plan.options.output_dir
    downloads = plan.downloads
    verified = {} if downloads is None else {"verified_shards": list(downloads.verified_shards)}
    head = {
        "tool_version": __version__,
        "options": plan.recorded,
        "source": source_identity(plan.checkpoint) | verified,
        **({} if main is None else {MAIN_IDENTITY: main}),
        "sizes": {
            "bytes_before": plan.sizes.before_bytes,
            "bytes_after": plan.sizes.after_bytes,
        },
    }
    folders = [(part, output / part.name) for part in plan.parts]
    content = manifest(head=head, parts=folders, finished=finished, source=plan.checkpoint)
    write_json(output / MANIFEST_NAME, content)
