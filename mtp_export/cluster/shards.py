"""Shards of a bundle as tasks of a cluster, coordinated by the process that has plan, journal and
manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.downloads import CHECKS
from mtp_export.bundle.journal_content import ShardFacts
from mtp_export.bundle.own_files import remove_unfinished
from mtp_export.bundle.request import Request
from mtp_export.bundle.run import Record
from mtp_export.bundle.work import Work
from mtp_export.cluster.ray_tasks import Tasks, run_tasks
from mtp_export.cluster.shard_task import Assignment, make_shard
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
        identity = json.loads(json.dumps(plan.identity))
        tasks = Tasks(
            function=make_shard,
            given=Assignment(self.request.absolute(), identity, compares),
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
