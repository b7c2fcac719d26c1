"""Runs a plan: workers take steps in order, every byte is read once, hashed and written once.

A copied tensor passes through one small buffer that stays in the processor's cache; a transform
reads its inputs in pieces of a given budget. Memory therefore does not depend on the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.journal import Journal
from mtp_export.checkpoint.links import Link, link_shard
from mtp_export.checkpoint.plan import COPY, OutputShard, OutputTensor, Step
from mtp_export.checkpoint.reader import read_chunks
from mtp_export.checkpoint.writer import ShardWriter

COPY_BUFFER_BYTES = 1 << 20

# Raises when the run is stopping; called now and then by whatever takes long.
Proceed = Callable[[], None]
Check = Callable[[Proceed], None]
Sink = Callable[[int, memoryview], None]
Transform = Callable[[Sequence[TensorInfo], Sequence[OutputTensor], Sink, int], None]


@dataclass(frozen=True)
class Job:
    """A shard to make, and the folder it belongs in; key names it in the journal."""

    key: str
    folder: Path
    shard: OutputShard


@dataclass(frozen=True)
class Means:
    """What a run may use. transforms: operation -> transform. budget_bytes is a worker's."""

    sources: Mapping[str, TensorInfo]
    transforms: Mapping[str, Transform]
    link: Link
    workers: int
    budget_bytes: int
    progress: Callable[[int], None]


class _Stopped(Exception):
    """Another worker failed, or the user interrupted."""


@dataclass
class _OpenShard:
    """A shard being written: what is still to do, and the checksums of what is done."""

    job: Job
    writer: ShardWriter | None = None
    remaining: int = 0
    checksums: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(jobs: Iterable[Job], means: Means, journal: Journal, checks: Sequence[Check] = ()) -> None:
    """Make every shard that the journal does not have yet; checks run beside the work.

    Raises the first error of a worker or a check, after all have stopped and unfinished shards are
    discarded.
    """
    open_shards = [
        _OpenShard(job, remaining=len(job.shard.steps))
        for job in jobs
        if not _already_there(job, journal, means)
    ]
    _Run(open_shards, means, journal).start(checks)


def _already_there(job: Job, journal: Journal, means: Means) -> bool:
    facts = journal.finished.get(job.key)
    path = job.folder / job.shard.file_name
    if facts is None or not path.is_file() or path.stat().st_size != facts["size_bytes"]:
        return False
    if job.shard.linked_from is None:
        means.progress(job.shard.size_bytes)
    return True


class _Run:
    def __init__(self, shards: Sequence[_OpenShard], means: Means, journal: Journal) -> None:
        self._shards, self._means, self._journal = shards, means, journal
        self._queue = self._tasks()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def start(self, checks: Sequence[Check]) -> None:
        with ThreadPoolExecutor(self._means.workers + len(checks)) as pool:
            futures = [pool.submit(self._guarded, self._work) for _ in range(self._means.workers)]
            futures += [pool.submit(self._guarded, check, self._proceed) for check in checks]
            try:
                wait(futures)
            except BaseException:
                self._stop.set()
                raise
            finally:
                wait(futures)
                self._discard_unfinished()
        for future in futures:
            error = future.exception()
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def _discard_unfinished(self) -> None:
        for shard in self._shards:
            if shard.writer is not None:
                shard.writer.discard()

    def _tasks(self) -> Iterator[tuple[_OpenShard, Step | None]]:
        for shard in self._shards:
            if shard.job.shard.linked_from is not None:
                yield shard, None
            else:
                yield from ((shard, step) for step in shard.job.shard.steps)

    def _guarded(self, action: Callable[..., None], *arguments: object) -> None:
        """Run something in a thread; its failure stops all the others."""
        try:
            action(*arguments)
        except BaseException:
            self._stop.set()
            raise

    def _work(self) -> None:
        buffer = memoryview(bytearray(COPY_BUFFER_BYTES))
        while True:
            with self._lock:
                task = next(self._queue, None)
            if task is None:
                return
            shard, step = task
            if step is None:
                self._link(shard.job)
            else:
                self._write(shard, step, buffer)

    def _link(self, job: Job) -> None:
        self._proceed()
        source = job.shard.linked_from
        assert source is not None
        target = job.folder / job.shard.file_name
        link_shard(self._means.link, source.path, target)
        self._note(job, {"size_bytes": source.size_bytes, "link": str(self._means.link)})

    def _write(self, shard: _OpenShard, step: Step, buffer: memoryview) -> None:
        writer = self._writer_of(shard)
        inputs = [self._means.sources[name] for name in step.inputs]
        hashes = [xxhash.xxh3_128() for _ in step.outputs]
        positions = [0] * len(step.outputs)

        def sink(output: int, data: memoryview) -> None:
            self._proceed()
            hashes[output].update(data)
            writer.write(step.outputs[output].name, positions[output], data)
            positions[output] += len(data)
            self._means.progress(len(data))

        if step.operation == COPY:
            for piece in read_chunks(inputs[0], buffer):
                sink(0, piece)
        else:
            transform = self._means.transforms[step.operation]
            transform(inputs, step.outputs, sink, self._means.budget_bytes)
        for tensor, position in zip(step.outputs, positions, strict=True):
            assert position == tensor.size_bytes, f"{tensor.name}: {position} bytes written"
        digests = {
            tensor.name: digest.hexdigest()
            for tensor, digest in zip(step.outputs, hashes, strict=True)
        }
        self._finish_step(shard, writer, digests)

    def _writer_of(self, shard: _OpenShard) -> ShardWriter:
        with shard.lock:
            if shard.writer is None:
                tensors = [tensor for step in shard.job.shard.steps for tensor in step.outputs]
                path = shard.job.folder / shard.job.shard.file_name
                shard.writer = ShardWriter(path, tensors)
            return shard.writer

    def _finish_step(
        self, shard: _OpenShard, writer: ShardWriter, digests: Mapping[str, str]
    ) -> None:
        with shard.lock:
            shard.checksums.update(digests)
            shard.remaining -= 1
            if shard.remaining:
                return
        self._proceed()
        writer.commit()
        checksums = {
            tensor.name: shard.checksums[tensor.name]
            for step in shard.job.shard.steps
            for tensor in step.outputs
        }
        self._note(shard.job, {"size_bytes": writer.size_bytes, "xxh3_128": checksums})

    def _note(self, job: Job, facts: Mapping[str, object]) -> None:
        with self._lock:
            self._journal.record(job.key, facts)

    def _proceed(self) -> None:
        if self._stop.is_set():
            raise _Stopped
