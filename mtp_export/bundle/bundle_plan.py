"""Plan of a bundle: a checked source, the parts to make of it, and what making them needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.sources.disk_queue import DiskQueue, disk_depth
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export import __version__
from mtp_export.bundle.downloads import REMOTE_BYTES, Downloads, plan_downloads, tensors_read
from mtp_export.bundle.links import existing_parent
from mtp_export.bundle.manifest import shard_versions, source_identity
from mtp_export.bundle.options import BundleOptions, Part, Share, divided
from mtp_export.bundle.run import ShardJob
from mtp_export.bundle.sizes import Sizes, sizes_of
from mtp_export.bundle.split import SplitOptions
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.plan import Copy, PartPlan, Step, Transform

# Measured resident memory: the program with its headers and plan, and what the compiled kernels and
# torch add where a plan needs them.
_BASE_BYTES = 80_000_000
_BYTES_PER_TENSOR = 2_200
_KERNEL_BYTES = 150_000_000
_TORCH_BYTES = 200_000_000
_MIN_BUDGET_BYTES = 16_000_000


@dataclass(frozen=True)
class Recipe:
    """Split of the tensors with their conversions, the options as the manifest keeps them, and the
    torch device of conversions that compute. draft: the plan of a draft in a checkpoint of its own,
    where it does not come along as a bundle has it."""

    split: SplitOptions
    recorded: Mapping[str, Any]
    device: str = "cpu"
    draft: PartPlan | None = None


@dataclass(frozen=True)
class BundlePlan:
    """A checked checkpoint and the parts to make of it; nothing is written yet.

    recorded are the options as the manifest keeps them, device the torch device that computes,
    left_out sentences on what of the source does not come along. main_tensors: of an MTP part
    alone, the source's main model, where its main part would be that one unchanged. calibration:
    its options that the manifest has not, by their names, with which its runs go on with others.
    """

    options: BundleOptions
    checkpoint: Checkpoint
    stored: StoredModel
    parts: tuple[PartPlan, ...]
    recorded: Mapping[str, Any]
    device: str = "cpu"
    left_out: tuple[str, ...] = ()
    main_tensors: tuple[TensorInfo, ...] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> frozenset[str]:
        """Files of the parts, as paths below the output."""
        return frozenset(f"{part.name}/{name}" for part in self.parts for name in part.file_names)

    @cached_property
    def jobs(self) -> tuple[ShardJob, ...]:
        """Shards of all parts, in order."""
        return tuple(
            ShardJob(
                key=f"{part.name}/{shard.file_name}",
                folder=self.options.output_dir / part.name,
                shard=shard,
            )
            for part in self.parts
            for shard in part.shards
        )

    @property
    def share_jobs(self) -> Sequence[ShardJob]:
        """Shards of the share that the options ask for, in order; all without one."""
        return jobs_of(self.jobs, self.options.run.share)

    @property
    def read_steps(self) -> Iterator[Step]:
        """Steps whose inputs are read, to be written or only checksummed."""
        return (step for job in self.jobs if job.shard.is_read for step in job.shard.steps)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Facts that two runs must have in common for one to go on with what the other finished, as
        JSON has them."""
        links = {job.key: str(job.shard.link) for job in self.jobs if job.shard.linked_from}
        identity = {
            "tool_version": __version__,
            "options": dict(self.recorded),
            "source": source_identity(self.checkpoint),
            "versions": shard_versions(self.checkpoint),
            "links": links,
            **({"calibration": dict(self.calibration)} if self.calibration else {}),
        }
        as_json: dict[str, Any] = json.loads(json.dumps(identity))
        return as_json

    @property
    def family(self) -> ModelSpec:
        """Family of the source."""
        return self.stored.family

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of all tensors beside those of the source."""
        return sizes_of(self.parts, self.checkpoint.tensors, self.stored)

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

    @cached_property
    def tied(self) -> TiedCopies:
        """Copies of the MTP part that must equal the main model's tensors."""
        content = self.options.content
        if content.allow_untied or content.part is Part.MAIN:
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
        computing = workers * _MIN_BUDGET_BYTES if self._transforms else 0
        return self._base_bytes + DiskQueue.memory_bytes(io_depth, workers) + computing

    @cached_property
    def _transforms(self) -> frozenset[Transform]:
        operations = {step.operation for step in self.written_steps}
        return frozenset(one for one in operations if not isinstance(one, Copy))

    @cached_property
    def _base_bytes(self) -> int:
        tensors = len(self.checkpoint.tensors)
        kernels = _KERNEL_BYTES if self._transforms else 0
        by_torch = any(one.uses_torch or self.device != "cpu" for one in self._transforms)
        remote = 0 if self.downloads is None else REMOTE_BYTES
        added = kernels + (_TORCH_BYTES if by_torch else 0) + remote
        return _BASE_BYTES + tensors * _BYTES_PER_TENSOR + added


def jobs_of(jobs: Sequence[ShardJob], share: Share | None) -> list[ShardJob]:
    """Return a share's jobs, in order; all without one."""
    if share is None:
        return list(jobs)
    numbers = divided([job.read_bytes for job in jobs], share.count)[share.number - 1]
    return [jobs[number] for number in numbers]
