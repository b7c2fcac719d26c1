"""One shard made by a process of a cluster, from the request of the bundle alone."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.files import temporary_path
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import CHECKS
from mtp_export.bundle.journal import first_difference
from mtp_export.bundle.journal_content import ShardFacts
from mtp_export.bundle.request import Request
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.bundle.work import Work, make_shards


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
    here = json.loads(json.dumps(plan.identity))
    if here != identity:
        theirs, ours = first_difference(identity, here)
        raise InvalidInputError(
            f"The machine {socket.gethostname()} sees another source or makes other links",
            where=plan.options.input_dir,
            expected=f"{theirs}, as the coordinator",
            found=ours,
            todo="Give all machines the same files at the same paths, and this version; links that"
            " work on some machines only need --link copy",
        )
