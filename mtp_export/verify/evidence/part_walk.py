"""One walk over the tensors of a part, which all checks share that look at their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any

from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.progress import ProgressCallback
from mtp_export.schemes.transforms import one_torch_thread
from mtp_export.schemes.weight_values import WeightOnDisk
from mtp_export.verify.evidence.tensor_threads import in_threads
from mtp_export.verify.evidence.weight_facts import Walker, WeightFacts


@dataclass(frozen=True)
class PartWalk:
    """Findings of one walk over a part: the facts of its weights, in their order, and the xxh3_128
    of all tensors that were read."""

    facts: tuple[WeightFacts, ...]
    checksums: Mapping[str, str]


@dataclass(frozen=True)
class _Pair:
    """A weight to read, and the source's that it was made of."""

    weight: WeightOnDisk
    source: WeightOnDisk | None

    @property
    def size_bytes(self) -> int:
        return self.weight.size_bytes


@dataclass(frozen=True)
class WalkPlan:
    """The weights of a part, each with its source's or None, and other tensors to hash."""

    weights: Sequence[tuple[WeightOnDisk, WeightOnDisk | None]]
    others: Sequence[TensorInfo]

    @property
    def size_bytes(self) -> int:
        """Bytes of the part that the walk reads."""
        weights = sum(weight.size_bytes for weight, _ in self.weights)
        return weights + sum(tensor.size_bytes for tensor in self.others)

    def run(self, workers: int, queue: DiskQueue, progress: ProgressCallback) -> PartWalk:
        """Read every byte once, in threads of which `workers` compute at a time (IoError)."""
        walker = Walker(queue, BoundedSemaphore(workers), progress)

        def read(task: _Pair | TensorInfo) -> WeightFacts | tuple[str, str]:
            if isinstance(task, TensorInfo):
                return task.name, walker.hash_tensor(task)
            return walker.read_weight(task.weight, task.source)

        tasks: list[_Pair | TensorInfo] = [*(_Pair(*pair) for pair in self.weights), *self.others]
        with one_torch_thread() if self.weights else nullcontext():
            found = list(
                in_threads(read, tasks, workers=workers, size_bytes=lambda task: task.size_bytes)
            )
        facts = tuple(one for one in found if isinstance(one, WeightFacts))
        checksums = dict(one for one in found if not isinstance(one, WeightFacts))
        for one in facts:
            checksums |= one.checksums
        return PartWalk(facts, checksums)


def recorded_checksums(checkpoint: Checkpoint, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of tensors that a part's entry in the manifest has, in file order."""
    found = {}
    for shard in checkpoint.shards:
        tensors = entry.get("shards", {}).get(shard.path.name, {}).get("tensors") or {}
        for tensor in shard.tensors:
            recorded = tensors.get(tensor.name, {}).get("xxh3_128")
            if recorded is not None:
                found[tensor.name] = recorded
    return found
