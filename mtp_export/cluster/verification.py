"""Bytes of a bundle as tasks of a cluster, each of which reads a share of them for a verification
that the coordinator ends."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import local_path
from mtp_export.bundle.options import Share
from mtp_export.cluster.ray_tasks import Tasks, run_tasks
from mtp_export.progress import ProgressCallback, silent
from mtp_export.verify.context import Context
from mtp_export.verify.evidence.findings import Known
from mtp_export.verify.options import VerifyOptions

TASK_BYTES = 4 << 30  # about as much of the bundle as a shard has; of the source as much again


@dataclass(frozen=True)
class Verification:
    """A verification as the coordinator has opened it."""

    options: VerifyOptions
    identity: str


@dataclass(frozen=True)
class PartShare:
    """A share of the bytes of main/ or mtp/."""

    part: str
    share: Share

    def __str__(self) -> str:
        return f"{self.part} {self.share}"


def read_on_cluster(address: str, context: Context) -> None:
    """Have a cluster read what the checks want to know of every byte, and tell the context.

    Raises what run_tasks and read_share do.
    """
    plans = {part: context.walks.plan(part) for part in context.checkpoints}
    keys = [share for part, plan in plans.items() for share in _shares(part, plan.size_bytes)]
    if not keys:
        return
    tasks = Tasks(
        function=read_share,
        given=Verification(_absolute(context.options), context.identity),
        keys=keys,
        workers=context.options.workers,
        failure="The cluster could not read a share of the bundle",
        todo="Check the memory of its machines, then run the same command again",
    )
    total_bytes = sum(plan.size_bytes for plan in plans.values())
    with context.show_progress("tensors, on the cluster", total_bytes) as progress:

        def take(key: PartShare, result: tuple[Known, int]) -> None:
            known, size_bytes = result
            context.walks.learn(key.part, known)
            progress(size_bytes)

        run_tasks(address, tasks, take)


def _shares(part: str, size_bytes: int) -> list[PartShare]:
    count = -(-size_bytes // TASK_BYTES)
    return [PartShare(part, Share(number, count)) for number in range(1, count + 1)]


def read_share(verification: Verification, key: PartShare) -> tuple[Known, int]:
    """Read a share on this machine; return the findings, and the bytes of the bundle in it.

    Raises InvalidInputError where this machine sees other files than the coordinator, IoError.
    """
    context = _opened(verification.options)
    if context.identity != verification.identity:
        raise InvalidInputError(
            f"The machine {socket.gethostname()} sees another bundle or source",
            where=context.options.bundle,
            expected="the files that the coordinator sees, and its version of this program",
            found="others",
            todo="Give all machines the same files at the same paths, let nothing write them"
            " meanwhile, and run the same command again",
        )
    plan, known = context.walks.share(key.part, key.share)
    return known, plan.size_bytes


@cache
def _opened(options: VerifyOptions) -> Context:
    """Open the bundle once per process, which reads several shares."""
    return Context.open(options, _shown_by_nobody)


def _shown_by_nobody(title: str, size_bytes: int) -> AbstractContextManager[ProgressCallback]:
    return nullcontext(silent)


def _absolute(options: VerifyOptions) -> VerifyOptions:
    """Return the options as a worker takes them, which is in another folder, and runs nothing."""
    source: Path | None = options.source and options.source.absolute()
    bundle = local_path(options.bundle).absolute()
    return replace(options, bundle=bundle, source=source, prompts=None, workdir=None)
