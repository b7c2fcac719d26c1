"""Run of a plan: workers take its steps in order, and read, hash and write every byte once. The
tensors of a linked shard are only hashed, if at all.

Tensors pass in pieces from reads ahead of the workers to writes behind them, so that memory does
not depend on the checkpoint's size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.sources.byte_source import local_path
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.staging import Stopped
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_checkpoints.tensors.writer import ShardWriter
from mtp_export.bundle.downloads import Inputs
from mtp_export.bundle.journal import ShardFacts
from mtp_export.bundle.links import link_shard
from mtp_export.bundle.tied_weights import compare_tied
from mtp_export.plan import (
    COPY,
    Copy,
    Facts,
    OutputShard,
    Resources,
    Step,
    Transform,
)
from mtp_export.schemes.transforms import Convert, load_kernels

# Raises when the run is stopping; long operations call it between pieces.
Proceed = Callable[[], None]
Check = Callable[[Proceed], None]
# Takes the key and the facts of a shard that is finished and on disk.
Record = Callable[[str, ShardFacts], None]


@dataclass(frozen=True)
class ShardJob:
    """A shard to make and the folder it belongs in; key names it in the journal."""

    key: str
    folder: Path
    shard: OutputShard

    @property
    def read_bytes(self) -> int:
        """Bytes that pass through the run, to be written or only checksummed."""
        return self.shard.size_bytes if self.shard.is_read else 0


@dataclass(frozen=True)
class RunResources:
    """Inputs and limits of a run; queue reads and writes, transform are the resources of one
    transform.

    tied: by the name of a copied source tensor, the one that it must equal byte by byte.
    """

    inputs: Inputs
    tied: Mapping[str, TensorInfo]
    workers: int
    queue: DiskQueue
    transform: Resources
    progress: Callable[[int], None]


@dataclass
class _OpenShard:
    """A shard being made: the number of steps to do, and checksums and facts of those done."""

    job: ShardJob
    remaining: int
    writer: ShardWriter | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(
    jobs: Iterable[ShardJob],
    record: Record,
    resources: RunResources,
    checks: Sequence[Check] = (),
) -> None:
    """Make shards; checks run at the same time.

    What conversions need is loaded while tensors that need none are being copied. Raises the first
    error of a worker or a check, after all have stopped and unfinished shards are discarded.
    """
    open_shards = [_OpenShard(job, len(_steps(job.shard))) for job in jobs]
    steps = (step for shard in open_shards for step in _steps(shard.job.shard))
    transforms = {step.operation for step in steps if step is not None and step.operation != COPY}
    with ExitStack() as computing:
        if transforms:
            checks = [*checks, partial(_begin_computing, resources, transforms, computing)]
        _Run(open_shards, resources, record).start(checks)


def _begin_computing(
    resources: RunResources,
    transforms: Collection[Copy | Transform],
    computing: ExitStack,
    _: Proceed,
) -> None:
    """Load what conversions need, and have torch leave its threads to the workers meanwhile."""
    device = resources.transform.device
    known = [one for one in transforms if not isinstance(one, Copy)]
    if device != "cpu" or any(transform.uses_torch for transform in known):
        from mtp_kernels.cpu.torch_threads import one_torch_thread  # a dry run needs no kernels

        computing.enter_context(one_torch_thread())
    load_kernels(device)


def is_made(job: ShardJob, finished: Mapping[str, ShardFacts]) -> bool:
    """Return whether a shard is finished, by its key, and still as it was written."""
    facts = finished.get(job.key)
    path = job.folder / job.shard.file_name
    if facts is None or not path.is_file() or path.stat().st_size != facts.size_bytes:
        return False
    return _describes(facts, job.shard)


def _describes(facts: ShardFacts, shard: OutputShard) -> bool:
    """Return whether facts are those that the shard has when it is finished."""
    link = str(shard.link) if shard.linked_from is not None else None
    names = {tensor.name for tensor in shard.tensors} if shard.is_read else set()
    return facts.link == link and (facts.xxh3_128 or {}).keys() == names >= facts.facts.keys()


def _steps(shard: OutputShard) -> Sequence[Step | None]:
    """Return the steps of a shard: its link (None) first, then those that have to be read."""
    link = (None,) if shard.linked_from is not None else ()
    return (*link, *(shard.steps if shard.is_read else ()))


def _joined(shard: OutputShard) -> Iterable[Sequence[Step]]:
    """Return the steps of each task of a shard, in order; none for its link."""
    tasks = dict[object, list[Step]]()
    for number, step in enumerate(_steps(shard)):
        operation = None if step is None else step.operation
        is_joined = isinstance(operation, Convert) and operation.joined
        key = frozenset(step.inputs) if step is not None and is_joined else number
        tasks.setdefault(key, []).extend(() if step is None else (step,))
    return tasks.values()


@dataclass(frozen=True)
class _Task:
    """Steps of a shard and their inputs, which are being read; without a step, the shard's link.

    There are several steps of joined weights, whose inputs are the same in another order. A copied
    tensor that must equal another one has that as its second input.
    """

    shard: _OpenShard
    steps: Sequence[Step]
    inputs: Sequence[TensorStream] = ()
    opened: ExitStack = field(default_factory=ExitStack)

    def inputs_of(self, step: Step) -> Sequence[TensorStream]:
        """Return the inputs of a step in its order."""
        if len(self.steps) == 1:
            return self.inputs
        return sorted(self.inputs, key=lambda stream: step.inputs.index(stream.info.name))


class _Tasks:
    """Tasks of a run in order, for any number of threads.

    The inputs of later ones are opened, and so read, while there is room in the queue: none of
    their workers will have to wait for the first bytes of a tensor.
    """

    def __init__(self, shards: Sequence[_OpenShard], resources: RunResources) -> None:
        self._resources = resources
        self._left = iter(
            [(shard, steps) for shard in shards for steps in _joined(shard.job.shard)]
        )
        self._opened: deque[_Task] = deque()
        self._lock = threading.Lock()

    def take(self) -> _Task | None:
        """Return the next task; None at the end."""
        queue = self._resources.queue
        with self._lock:
            while not self._opened or (queue.has_room and len(self._opened) < queue.depth):
                task = next(self._left, None)
                if task is None:
                    break
                self._opened.append(self._open(*task))
            return self._opened.popleft() if self._opened else None

    def close(self) -> None:
        """Close the inputs of what nobody took."""
        for task in self._opened:
            task.opened.close()

    def _open(self, shard: _OpenShard, steps: Sequence[Step]) -> _Task:
        if not steps:
            return _Task(shard, steps)
        step, *_ = steps
        tensors = [self._resources.inputs.tensors[name] for name in step.inputs]
        if isinstance(step.operation, Copy) and tensors[0].name in self._resources.tied:
            tensors.append(self._resources.tied[tensors[0].name])
        queue = self._resources.queue
        with ExitStack() as opened:
            inputs = [opened.enter_context(TensorStream(tensor, queue)) for tensor in tensors]
            return _Task(shard, steps, inputs, opened.pop_all())


def _journal_facts(shard: _OpenShard) -> ShardFacts:
    """Return what the journal keeps of a finished shard, for the manifest."""
    plan, writer = shard.job.shard, shard.writer
    checksums = None
    if plan.is_read:
        checksums = {tensor.name: shard.checksums[tensor.name] for tensor in plan.tensors}
    if plan.linked_from is not None:
        size_bytes = plan.linked_from.size_bytes
        return ShardFacts(size_bytes, str(plan.link), xxh3_128=checksums, facts=shard.facts)
    assert writer is not None
    return ShardFacts(writer.size_bytes, xxh3_128=checksums, facts=shard.facts)


def _copy(inputs: Sequence[TensorStream], use: Callable[[memoryview], None]) -> None:
    """Pass a tensor on in pieces; compare it with the one that it must equal, if there is one."""
    if len(inputs) == 1:
        for piece in inputs[0].blocks():
            use(piece)
    else:
        own, main = inputs
        compare_tied(own, main, use)


class _Run:
    def __init__(
        self, shards: Sequence[_OpenShard], resources: RunResources, record: Record
    ) -> None:
        self._shards, self._resources, self._record = shards, resources, record
        self._tasks = _Tasks(shards, resources)
        self._lock = threading.Lock()
        self._stop = resources.inputs.stopping
        self._begin = threading.Event()

    def start(self, checks: Sequence[Check]) -> None:
        futures: list[Future[None]] = []
        try:
            with ThreadPoolExecutor(self._resources.workers + len(checks)) as pool:
                try:
                    for check in checks:
                        futures.append(pool.submit(self._guarded, check, self._proceed))
                    for _ in range(self._resources.workers):
                        futures.append(pool.submit(self._guarded, self._work))
                    self._begin.set()
                    wait(futures)
                except BaseException:
                    self._stop.set()
                    self._begin.set()
                    raise
        finally:  # the pool has ended: no thread reads or writes any more
            self._tasks.close()
            self._discard_unfinished()
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, Stopped):
                raise error

    def _discard_unfinished(self) -> None:
        for shard in self._shards:
            if shard.writer is not None:
                shard.writer.discard()

    def _guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Run an action in a thread; its failure stops all other threads.

        It begins when the pool knows all threads: if an interrupt hides one from the pool while it
        starts, that one must find the run stopped.
        """
        self._begin.wait()
        try:
            self._proceed()
            action(*arguments)
        except BaseException:
            self._stop.set()
            raise

    def _work(self) -> None:
        while (task := self._tasks.take()) is not None:
            if not task.steps:
                self._link(task.shard)
            measured = dict[str, Any]() if len(task.steps) > 1 else None
            with task.opened:
                for step in task.steps:
                    self._do(task, step, replace(self._resources.transform, measured=measured))

    def _link(self, shard: _OpenShard) -> None:
        self._proceed()
        job = shard.job
        assert job.shard.linked_from is not None
        source = local_path(job.shard.linked_from.path)
        link_shard(job.shard.link, source, job.folder / job.shard.file_name)
        self._finish_step(shard, {}, {})

    def _do(self, task: _Task, step: Step, resources: Resources) -> None:
        """Read a step's inputs, and hash and write its outputs; only hash a linked shard's."""
        shard, inputs = task.shard, task.inputs_of(step)
        writer = None if shard.job.shard.linked_from is not None else self._writer_of(shard)
        hashes = [xxhash.xxh3_128() for _ in step.outputs]
        positions = [0] * len(step.outputs)

        def sink(output: int, data: memoryview) -> None:
            self._proceed()
            hashes[output].update(data)
            if writer is not None:
                writer.write(step.outputs[output].name, data)
            positions[output] += len(data)
            self._resources.progress(len(data))

        facts: Facts = {}
        if isinstance(step.operation, Copy):
            _copy(inputs, partial(sink, 0))
        else:
            transform = step.operation
            facts = transform.run(inputs, step.outputs, sink=sink, resources=resources)
        for tensor, position in zip(step.outputs, positions, strict=True):
            assert position == tensor.size_bytes, f"{tensor.name}: {position} bytes written"
        digests = {
            tensor.name: digest.hexdigest()
            for tensor, digest in zip(step.outputs, hashes, strict=True)
        }
        self._finish_step(shard, digests, {step.outputs[0].name: facts} if facts else {})

    def _writer_of(self, shard: _OpenShard) -> ShardWriter:
        with shard.lock:
            if shard.writer is None:
                plan, queue = shard.job.shard, self._resources.queue
                shard.writer = ShardWriter(shard.job.folder / plan.file_name, plan.layout(), queue)
            return shard.writer

    def _finish_step(
        self, shard: _OpenShard, digests: Mapping[str, str], facts: Mapping[str, Facts]
    ) -> None:
        with shard.lock:
            shard.checksums.update(digests)
            shard.facts.update(facts)
            shard.remaining -= 1
            if shard.remaining:
                return
        self._proceed()
        with self._resources.inputs.finishing(shard.job.key):
            if shard.writer is not None:
                shard.writer.commit()
            with self._lock:
                self._record(shard.job.key, _journal_facts(shard))

    def _proceed(self) -> None:
        if self._stop.is_set():
            raise Stopped
