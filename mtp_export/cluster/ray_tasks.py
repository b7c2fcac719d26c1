"""Shards as tasks of a Ray cluster, coordinated by the process that has plan, journal and manifest.

A worker or machine that dies loses the shard that it was at, which Ray gives to another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import CHECKS
from mtp_export.bundle.own_files import remove_unfinished
from mtp_export.bundle.request import Request
from mtp_export.bundle.run import Record
from mtp_export.bundle.work import Work
from mtp_export.cluster.shard_task import Assignment, make_shard
from mtp_export.errors import IoError, UnsupportedError
from mtp_export.progress import ProgressCallback

LOCAL = "local"
# Attempts that may die with their worker or machine: more at one shard are no accident.
_MOST_DEATHS = 8


@dataclass(frozen=True)
class RayCluster:
    """Maker of the shards of a request on a cluster: local, auto, or ray://host:port."""

    address: str
    request: Request

    def __call__(
        self, plan: BundlePlan, work: Work, record: Record, progress: ProgressCallback
    ) -> None:
        """Make the shards of a work; record and progress are called in this process.

        Raises UnsupportedError without Ray, IoError where the cluster cannot be reached or a shard
        killed its workers, and what make_shards does.
        """
        sizes = {job.key: job.read_bytes for job in work.jobs}
        compares = bool(work.tied.alike or work.tied.unlike)
        keys = [*([CHECKS] if work.checks and compares else []), *sizes]
        identity = json.loads(json.dumps(plan.identity))
        with _connected(self.address) as ray:
            assignment = ray.put(Assignment(self.request.absolute(), identity, compares))
            task = ray.remote(
                num_cpus=_cores(ray, plan.options.run.workers),
                max_retries=_MOST_DEATHS,
                scheduling_strategy="SPREAD",
            )(make_shard)
            running = {task.options(name=key).remote(assignment, key): key for key in keys}
            while running:
                (done, *_), _ = ray.wait(list(running), num_returns=1)
                key = running.pop(done)
                facts = _result(ray, done, key)
                if key != CHECKS:
                    record(key, facts)
                    progress(sizes[key])
        # what those that died were at, and attempts that were taken for dead
        remove_unfinished(plan.options.output_dir, plan.files, kept=plan.files)


def _result(ray: Any, reference: Any, key: str) -> Any:
    """Return a task's result; raises what it raised."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise IoError(
            "The cluster could not make a shard",
            where=key,
            found=str(error).partition("\n")[0],
            todo="Check the memory of its machines (--max-memory is that of one shard), then run"
            " the same command again: it goes on where it stopped",
        ) from error


def _cores(ray: Any, workers: int) -> int:
    """Return the cores of one task: as many as it has workers, or as the largest machine has."""
    machines = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, min(workers, int(max(machines, default=1))))


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Provide Ray, connected to a cluster until the end of the block; a local one ends with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the home folder
        options |= {"include_dashboard": False}
    try:
        import ray
    except ImportError:
        raise UnsupportedError(
            "--cluster needs Ray, which is not installed",
            found=f"--cluster {address}",
            todo="Install it on all machines with pip install 'mtp-export[ray]', or divide the work"
            " with --share, which needs nothing",
        ) from None
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise IoError(
            "The Ray cluster cannot be reached",
            where=address,
            found=str(error).partition("\n")[0],
            todo="Start it with ray start, or use --cluster local",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
