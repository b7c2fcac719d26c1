"""Run of a plan: workers take its steps in order, and read, hash and write every byte once. The
tensors of a linked shard are only hashed, if at all.

Tensors pass in pieces from reads ahead of the workers to writes behind them, so that memory does
not depend on the checkpoint's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import xxhash

from mtp_export.bundle.downloads import Inputs
from mtp_export.bundle.journal import Journal
from mtp_export.bundle.journal_content import ShardFacts
from mtp_export.bundle.links import link_shard
from mtp_export.bundle.tied_weights import compare_tied
from mtp_export.checkpoint.byte_source import local_path
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.plan import Copy, Facts, OutputShard, Resources, Step
from mtp_export.checkpoint.staging import Stopped
from mtp_export.checkpoint.tensor_stream import TensorStream
from mtp_export.checkpoint.writer import ShardWriter

# Raises when the run is stopping; long operations call it between pieces.
Proceed = Callable[[], None]
Check = Callable[[Proceed], None]


@dataclass(frozen=True)
class ShardJob:
    """A shard to make and the folder it belongs in; key names it in the journal."""

    key: str
    folder: Path
    shard: OutputShard


@dataclass(frozen=True)
class RunResources:
    """Inputs and limits of a run; transform are the resources of one transform.

    tied: by the name of a copied source tensor, the one that it must equal byte by byte.
    """

    inputs: Inputs
    tied: Mapping[str, TensorInfo]
    workers: int
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
    journal: Journal,
    resources: RunResources,
    checks: Sequence[Check] = (),
) -> None:
    """Make shards; checks run at the same time.

    Raises the first error of a worker or a check, after all have stopped and unfinished shards are
    discarded.
    """
    open_shards = [_OpenShard(job, len(_tasks(job.shard))) for job in jobs]
    _Run(open_shards, resources, journal).start(checks)


def is_made(job: ShardJob, journal: Journal) -> bool:
    """Return whether the journal has a shard that is still as it was written."""
    facts = journal.finished.get(job.key)
    path = job.folder / job.shard.file_name
    if facts is None or not path.is_file() or path.stat().st_size != facts.size_bytes:
        return False
    return _describes(facts, job.shard)


def _describes(facts: ShardFacts, shard: OutputShard) -> bool:
    """Return whether facts are those that the shard has when it is finished."""
    link = str(shard.link) if shard.linked_from is not None else None
    names = {tensor.name for tensor in shard.tensors} if shard.is_read else set()
    return facts.link == link and (facts.xxh3_128 or {}).keys() == names >= facts.facts.keys()


def _tasks(shard: OutputShard) -> Sequence[Step | None]:
    """Return the tasks of a shard: its link (None) first, then the steps that have to be read."""
    link = (None,) if shard.linked_from is not None else ()
    return (*link, *(shard.steps if shard.is_read else ()))


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


class _Run:
    def __init__(
        self, shards: Sequence[_OpenShard], resources: RunResources, journal: Journal
    ) -> None:
        self._shards, self._resources, self._journal = shards, resources, journal
        self._queue = iter([(shard, task) for shard in shards for task in _tasks(shard.job.shard)])
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
        finally:  # the pool has ended: no thread writes any more
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
        while True:
            with self._lock:
                task = next(self._queue, None)
            if task is None:
                return
            shard, step = task
            if step is None:
                self._link(shard)
            else:
                self._do(shard, step)

    def _link(self, shard: _OpenShard) -> None:
        self._proceed()
        job = shard.job
        assert job.shard.linked_from is not None
        source = local_path(job.shard.linked_from.path)
        link_shard(job.shard.link, source, job.folder / job.shard.file_name)
        self._finish_step(shard, {}, {})

    def _do(self, shard: _OpenShard, step: Step) -> None:
        """Read a step's inputs, and hash and write its outputs; only hash a linked shard's."""
        writer = None if shard.job.shard.linked_from is not None else self._writer_of(shard)
        inputs = [self._resources.inputs.tensors[name] for name in step.inputs]
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
            self._copy(inputs[0], partial(sink, 0))
        else:
            transform = step.operation
            facts = transform.run(
                inputs, step.outputs, sink=sink, resources=self._resources.transform
            )
        for tensor, position in zip(step.outputs, positions, strict=True):
            assert position == tensor.size_bytes, f"{tensor.name}: {position} bytes written"
        digests = {
            tensor.name: digest.hexdigest()
            for tensor, digest in zip(step.outputs, hashes, strict=True)
        }
        self._finish_step(shard, digests, {step.outputs[0].name: facts} if facts else {})

    def _copy(self, tensor: TensorInfo, use: Callable[[memoryview], None]) -> None:
        """Read a tensor in pieces; compare it with the one that it must equal, if there is one."""
        queue = self._resources.transform.queue
        main = self._resources.tied.get(tensor.name)
        if main is not None:
            compare_tied(tensor, main, use=use, queue=queue)
            return
        with TensorStream(tensor, queue) as stream:
            for piece in stream.blocks():
                use(piece)

    def _writer_of(self, shard: _OpenShard) -> ShardWriter:
        with shard.lock:
            if shard.writer is None:
                plan, queue = shard.job.shard, self._resources.transform.queue
                shard.writer = ShardWriter(shard.job.folder / plan.file_name, plan.tensors, queue)
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
                self._journal.record(shard.job.key, _journal_facts(shard))

    def _proceed(self) -> None:
        if self._stop.is_set():
            raise Stopped
