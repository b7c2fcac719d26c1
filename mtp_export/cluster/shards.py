"""Shards of a bundle as tasks of a cluster, coordinated by the process that has plan, journal and
manifest; each is made by another process from the request of the bundle alone."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.files import temporary_path
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME
from mtp_export.bundle.build import Work, make_shards
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import CHECKS
from mtp_export.bundle.journal import ShardFacts, first_difference
from mtp_export.bundle.request import Request
from mtp_export.bundle.run import Record
from mtp_export.bundle.run_folder import remove_unfinished
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.cluster.ray_tasks import Tasks, run_tasks
from mtp_export.progress import ProgressCallback


@dataclass(frozen=True)
class RayCluster:
    """Maker of the shards of a request on a cluster: local, auto, or ray://host:port."""

    address: str
    request: Request

    def __call__(
        self, plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback
    ) -> None:
        """Make the shards of a work; record and progress are called in this process.

        Raises what run_tasks and make_shards do.
        """
        sizes = {job.key: job.read_bytes for job in work.jobs}
        compares = bool(work.tied.alike or work.tied.unlike)
        tasks = Tasks(
            function=make_shard,
            given=Assignment(self.request.absolute(), plan.identity, compares),
            keys=[*([CHECKS] if work.checks and compares else []), *sizes],
            workers=plan.options.run.workers,
            failure="The cluster could not make a shard",
            todo="Check the memory of its machines (--max-memory is that of one shard), then run"
            " the same command again: it goes on where it stopped",
        )

        def take(key: str, facts: ShardFacts) -> None:
            if key != CHECKS:
                record(key, facts)
                progress(sizes[key])

        run_tasks(self.address, tasks, take)
        # what those that died were at, and attempts that were taken for dead
        remove_unfinished(plan.options.output_dir, plan.files, kept=plan.files)


@dataclass(frozen=True)
class Assignment:
    """The bundle as the coordinator has planned it; compares: tied copies are compared."""

    request: Request
    identity: Mapping[str, Any]
    compares: bool


def make_shard(assignment: Assignment, key: str) -> ShardFacts:
    """Make a shard by its key, or compare the copies that no shard has (CHECKS).

    Raises InvalidInputError where this machine sees another source than the coordinator, and what
    make_shards does.
    """
    plan = _planned(assignment.request)
    _check_same(plan, assignment.identity)
    finished = {CHECKS: ShardFacts(0)}
    room = temporary_path(plan.options.output_dir / DOWNLOADS_NAME)  # of this attempt alone
    work = Work(
        jobs=[job for job in plan.jobs if job.key == key],
        room=room,
        tied=plan.tied if assignment.compares else TiedCopies.nothing(plan.stored),
        checks=key == CHECKS,
    )
    if plan.downloads is not None:
        room.mkdir(parents=True)
    try:
        make_shards(plan, work, finished.__setitem__, lambda count: None)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return finished[key]


@cache
def _planned(request: Request) -> BundlePlan:
    """Plan once per process, which makes several shards."""
    return request.plan()


def _check_same(plan: BundlePlan, identity: Mapping[str, Any]) -> None:
    if plan.identity != identity:
        theirs, ours = first_difference(identity, plan.identity)
        raise InvalidInputError(
            f"The machine {socket.gethostname()} sees another source or makes other links",
            where=plan.options.input_dir,
            expected=f"{theirs}, as the coordinator",
            found=ours,
            todo="Give all machines the same files at the same paths, and this version; links that"
            " work on some machines only need --link copy",
        )
