"""Work of one process on a plan: shards that it makes, and the files that make a bundle whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.files import make_folder, write_bytes, write_json
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export import __version__
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import CHECKS, opened_inputs
from mtp_export.bundle.journal_content import ShardFacts
from mtp_export.bundle.manifest import manifest, source_identity
from mtp_export.bundle.run import Record, RunResources, ShardJob, is_made, run
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.plan import COPY, Resources
from mtp_export.progress import ProgressCallback


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


def jobs_left(
    jobs: Sequence[ShardJob], finished: Mapping[str, ShardFacts], progress: ProgressCallback
) -> list[ShardJob]:
    """Return the shards that are still to be made; progress is told the bytes of the others."""
    made = {job.key for job in jobs if is_made(job, finished)}
    progress(sum(job.read_bytes for job in jobs if job.key in made))
    return [job for job in jobs if job.key not in made]


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


def write_beside(plan: BundlePlan) -> None:
    """Write the files beside the shards, but for the manifest.

    Configs come after all that may fail: no loader can take an unfinished part for whole.
    """
    output = plan.options.output_dir
    for part in plan.parts:
        folder = output / part.name
        make_folder(folder)
        for name in part.extra_files:
            make_folder((folder / name).parent)
            write_bytes(folder / name, plan.checkpoint.files.read(name))
        for name in part.index_names:
            write_json(folder / name, part.index())
    for part in plan.parts:
        write_json(output / part.name / CONFIG_NAME, part.config)


def write_rest(plan: BundlePlan, finished: Mapping[str, ShardFacts]) -> None:
    """Write the files beside the shards, and last the manifest."""
    write_beside(plan)
    output = plan.options.output_dir
    downloads = plan.downloads
    verified = {} if downloads is None else {"verified_shards": list(downloads.verified_shards)}
    head = {
        "tool_version": __version__,
        "options": plan.recorded,
        "source": source_identity(plan.checkpoint) | verified,
    }
    folders = [(part, output / part.name) for part in plan.parts]
    content = manifest(head=head, parts=folders, finished=finished, source=plan.checkpoint)
    write_json(output / MANIFEST_NAME, content)
