"""One walk over the tensors of a part, which all checks share that look at their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import Any, TypeVar

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.bundle.options import Share, divided
from mtp_export.progress import ProgressCallback
from mtp_export.verify.evidence.findings import Known, known_facts
from mtp_export.verify.evidence.mlp_notes import Notes, Router
from mtp_export.verify.evidence.weight_facts import Walker, WeightFacts
from mtp_kernels.cpu.torch_threads import one_torch_thread


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
    """The weights of a part, each with its source's or None, and other tensors to hash. noted:
    names of the weights of which something is noted, and the router that each is compared with."""

    weights: Sequence[tuple[WeightOnDisk, WeightOnDisk | None]]
    others: Sequence[TensorInfo]
    noted: Mapping[str, Router | None] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of the part that the walk reads."""
        weights = sum(weight.size_bytes for weight, _ in self.weights)
        return weights + sum(tensor.size_bytes for tensor in self.others)

    def of_share(self, share: Share) -> WalkPlan:
        """Return the part of the plan that is a share's."""
        tasks = self._tasks
        numbers = divided([task.size_bytes for task in tasks], share.count)[share.number - 1]
        return self._of([tasks[number] for number in numbers])

    def without(self, known: Known) -> WalkPlan:
        """Return the part of the plan that is not known yet."""
        return self._of([task for task in self._tasks if not _is_known(task, known)])

    def joined(self, known: Known, walk: PartWalk) -> PartWalk:
        """Return what the whole plan finds, of what is known and a walk over the rest."""
        found = {facts.weight.name: facts for facts in walk.facts}
        facts = tuple(
            found.get(weight.name) or known.facts(weight, source) for weight, source in self.weights
        )
        return _walk(facts, {**known.checksums, **walk.checksums})

    def _of(self, tasks: Sequence[_Pair | TensorInfo]) -> WalkPlan:
        return WalkPlan(
            weights=[(task.weight, task.source) for task in tasks if isinstance(task, _Pair)],
            others=[task for task in tasks if isinstance(task, TensorInfo)],
            noted=self.noted,
        )

    @property
    def _tasks(self) -> list[_Pair | TensorInfo]:
        return [*(_Pair(*pair) for pair in self.weights), *self.others]

    @property
    def is_small(self) -> bool:
        """True where threads would wait for each other for longer than they compute."""
        return max((task.size_bytes for task in self._tasks), default=0) < _LEAST_BYTES

    def run(self, workers: int, queue: DiskQueue, progress: ProgressCallback) -> PartWalk:
        """Read every byte once, in threads of which `workers` compute at a time, 0: in this one
        (IoError)."""
        walker = Walker(queue, BoundedSemaphore(max(1, workers)), progress)

        def read(task: _Pair | TensorInfo) -> WeightFacts | tuple[str, str]:
            if isinstance(task, TensorInfo):
                return task.name, walker.hash_tensor(task)
            name, notes = task.weight.name, None
            if name in self.noted:
                notes = Notes(task.weight, self.noted[name])
            return walker.read_weight(task.weight, task.source, notes)

        tasks = self._tasks
        with one_torch_thread() if self.weights else nullcontext():
            found = list(
                in_threads(read, tasks, workers=workers, size_bytes=lambda task: task.size_bytes)
            )
        facts = tuple(one for one in found if isinstance(one, WeightFacts))
        return _walk(facts, dict(one for one in found if not isinstance(one, WeightFacts)))


def _walk(facts: tuple[WeightFacts, ...], others: Mapping[str, str]) -> PartWalk:
    """Return a walk with the checksums of others, and those of weights' tensors that are none."""
    checksums: dict[str, str] = {}
    for one in facts:
        checksums |= one.checksums
    return PartWalk(facts, checksums | dict(others))


def known_of(walk: PartWalk) -> Known:
    """Return the findings of a walk as they are kept."""
    weights = {one.weight.name: known_facts(one) for one in walk.facts}
    own = {name: digest for one in walk.facts for name, digest in one.checksums.items()}
    return Known(
        {name: facts for name, facts in weights.items() if facts is not None},
        {name: digest for name, digest in walk.checksums.items() if own.get(name) != digest},
    )


def _is_known(task: _Pair | TensorInfo, known: Known) -> bool:
    if isinstance(task, _Pair):
        return task.weight.name in known.weights
    return task.name in known.checksums


def recorded_checksums(checkpoint: Checkpoint, entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of tensors that a part's entry in the manifest has, in file order."""
    found = {}
    for shard in checkpoint.shards:
        tensors = entry.get("shards", {}).get(shard.path.name, {}).get("tensors") or {}
        for tensor in shard.written:
            recorded = tensors.get(tensor.name, {}).get("xxh3_128")
            if recorded is not None:
                found[tensor.name] = recorded
    return found


# One computes, while the other opens its files and waits for the first bytes.
THREADS_PER_WORKER = 2
_LEAST_BYTES = 1 << 20  # of the largest weight of a part that is read in threads

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int,
    size_bytes: Callable[[Task], int],
) -> Iterator[Result]:
    """Yield work(task) of every task, in order; the first failure, or Ctrl-C, drops the rest.

    The largest tasks begin first, so that none is left to one thread at the end. Without workers
    this thread does all.
    """
    if not workers:
        yield from map(work, tasks)
        return
    pool = ThreadPoolExecutor(THREADS_PER_WORKER * workers)
    try:
        begun = {
            number: pool.submit(work, tasks[number])
            for number in sorted(range(len(tasks)), key=lambda at: -size_bytes(tasks[at]))
        }
        for number in range(len(tasks)):
            yield begun.pop(number).result()
    finally:
        pool.shutdown(cancel_futures=True)
