"""Runs a plan: workers take steps in order, every byte is read once, hashed and written once;
those of a linked shard are hashed only, if that.

A copied tensor passes through one small buffer that stays in the processor's cache; a transform
reads its inputs in pieces of a given budget. Memory therefore does not depend on the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from mtp_export.bundle.journal import Journal
from mtp_export.bundle.links import link_shard
from mtp_export.bundle.tied_weights import PIECE_BYTES, hold_against
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.plan import Copy, Facts, OutputShard, Resources, Step
from mtp_export.checkpoint.tensor_reader import TensorReader, aligned_buffer
from mtp_export.checkpoint.writer import GATHERED_BYTES, ShardWriter

# A worker that copies has a buffer, one more while it compares, and one where the writer gathers.
COPY_BUFFER_BYTES = 2 * PIECE_BYTES + GATHERED_BYTES

# Raises when the run is stopping; called now and then by whatever takes long.
Proceed = Callable[[], None]
Check = Callable[[Proceed], None]


@dataclass(frozen=True)
class Job:
    """A shard to make, and the folder it belongs in; key names it in the journal."""

    key: str
    folder: Path
    shard: OutputShard


@dataclass(frozen=True)
class Means:
    """What a run may use. resources are a worker's.

    twins: source tensors that must equal another one, which is held against them as they are read.
    """

    sources: Mapping[str, TensorInfo]
    twins: Mapping[str, TensorInfo]
    workers: int
    resources: Resources
    progress: Callable[[int], None]


class _Stopped(Exception):
    """Another worker failed, or the user interrupted."""


@dataclass
class _OpenShard:
    """A shard being made: what is still to do, and what is known of the tensors done."""

    job: Job
    remaining: int
    writer: ShardWriter | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(jobs: Iterable[Job], means: Means, journal: Journal, checks: Sequence[Check] = ()) -> None:
    """Make every shard that the journal does not have yet; checks run beside the work.

    Raises the first error of a worker or a check, after all have stopped and unfinished shards are
    discarded.
    """
    open_shards = [
        _OpenShard(job, len(_tasks(job.shard)))
        for job in jobs
        if not _already_there(job, journal, means)
    ]
    _Run(open_shards, means, journal).start(checks)


def _already_there(job: Job, journal: Journal, means: Means) -> bool:
    facts = journal.finished.get(job.key)
    path = job.folder / job.shard.file_name
    if facts is None or not path.is_file() or path.stat().st_size != facts["size_bytes"]:
        return False
    if job.shard.is_read:
        means.progress(job.shard.size_bytes)
    return True


def _tasks(shard: OutputShard) -> Sequence[Step | None]:
    """What a shard asks for: its link (None) first, then the tensors that have to be read."""
    link = (None,) if shard.linked_from is not None else ()
    return (*link, *(shard.steps if shard.is_read else ()))


def _noted(shard: _OpenShard) -> dict[str, Any]:
    """What the journal keeps of a finished shard: the manifest is made of it."""
    plan = shard.job.shard
    if plan.linked_from is not None:
        noted: dict[str, Any] = {"size_bytes": plan.linked_from.size_bytes, "link": str(plan.link)}
    else:
        assert shard.writer is not None
        noted = {"size_bytes": shard.writer.size_bytes}
    if plan.is_read:
        names = [tensor.name for step in plan.steps for tensor in step.outputs]
        noted["xxh3_128"] = {name: shard.checksums[name] for name in names}
        noted["facts"] = shard.facts
    return noted


class _Run:
    def __init__(self, shards: Sequence[_OpenShard], means: Means, journal: Journal) -> None:
        self._shards, self._means, self._journal = shards, means, journal
        self._queue = iter([(shard, task) for shard in shards for task in _tasks(shard.job.shard)])
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._begin = threading.Event()

    def start(self, checks: Sequence[Check]) -> None:
        futures: list[Future[None]] = []
        try:
            with ThreadPoolExecutor(self._means.workers + len(checks)) as pool:
                try:
                    for check in checks:
                        futures.append(pool.submit(self._guarded, check, self._proceed))
                    for _ in range(self._means.workers):
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
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def _discard_unfinished(self) -> None:
        for shard in self._shards:
            if shard.writer is not None:
                shard.writer.discard()

    def _guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Run something in a thread; its failure stops all the others.

        It begins when all threads are known to the pool: one that an interrupt hides from the pool
        while it starts must find that there is nothing to do any more.
        """
        self._begin.wait()
        try:
            self._proceed()
            action(*arguments)
        except BaseException:
            self._stop.set()
            raise

    def _work(self) -> None:
        buffer = aligned_buffer(PIECE_BYTES)
        while True:
            with self._lock:
                task = next(self._queue, None)
            if task is None:
                return
            shard, step = task
            if step is None:
                self._link(shard)
            else:
                self._do(shard, step, buffer)

    def _link(self, shard: _OpenShard) -> None:
        self._proceed()
        job = shard.job
        assert job.shard.linked_from is not None
        link_shard(job.shard.link, job.shard.linked_from.path, job.folder / job.shard.file_name)
        self._finish_step(shard, {}, {})

    def _do(self, shard: _OpenShard, step: Step, buffer: memoryview) -> None:
        """Read a step's inputs, and hash and write its outputs; of a linked shard, only hash."""
        writer = None if shard.job.shard.linked_from is not None else self._writer_of(shard)
        inputs = [self._means.sources[name] for name in step.inputs]
        hashes = [xxhash.xxh3_128() for _ in step.outputs]
        positions = [0] * len(step.outputs)

        def sink(output: int, data: memoryview) -> None:
            self._proceed()
            hashes[output].update(data)
            if writer is not None:
                writer.write(step.outputs[output].name, data)
            positions[output] += len(data)
            self._means.progress(len(data))

        facts: Facts = {}
        if isinstance(step.operation, Copy):
            self._copy(inputs[0], partial(sink, 0), buffer)
        else:
            facts = step.operation.run(inputs, step.outputs, sink, self._means.resources)
        for tensor, position in zip(step.outputs, positions, strict=True):
            assert position == tensor.size_bytes, f"{tensor.name}: {position} bytes written"
        digests = {
            tensor.name: digest.hexdigest()
            for tensor, digest in zip(step.outputs, hashes, strict=True)
        }
        self._finish_step(shard, digests, {step.outputs[0].name: facts} if facts else {})

    def _copy(
        self, tensor: TensorInfo, use: Callable[[memoryview], None], buffer: memoryview
    ) -> None:
        """Every byte, in pieces."""
        twin = self._means.twins.get(tensor.name)
        if twin is not None:
            hold_against(tensor, twin, use, buffer)
            return
        with TensorReader(tensor, once=True) as reader:
            for piece in reader.chunks(buffer):
                use(piece)

    def _writer_of(self, shard: _OpenShard) -> ShardWriter:
        with shard.lock:
            if shard.writer is None:
                tensors = [tensor for step in shard.job.shard.steps for tensor in step.outputs]
                path = shard.job.folder / shard.job.shard.file_name
                shard.writer = ShardWriter(path, tensors)
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
        if shard.writer is not None:
            shard.writer.commit()
        with self._lock:
            self._journal.record(shard.job.key, _noted(shard))

    def _proceed(self) -> None:
        if self._stop.is_set():
            raise _Stopped
