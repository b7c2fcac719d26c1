"""Queue of a disk: reads and writes that go on beside the threads that compute.

A disk that has one transfer to do at a time is idle between them. The queue holds several under
way, in threads of the standard library's executors, and lends the memory for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from mtp_checkpoints.sources.byte_source import OpenFile
from mtp_checkpoints.sources.direct_io import SLACK_BYTES, page_memory

BLOCK_BYTES = 2 << 20  # of one transfer
_DEPTH_OF_A_DISK = 16
_MAX_DEPTH = 64
# Less is not worth a block, nor another thread where the disk need not be waited for.
SMALL_BYTES = 64 << 10
_DEVICES = Path("/sys/dev/block")


def disk_depth(path: Path, devices: Path = _DEVICES) -> int:
    """Return the depth that keeps the disk of an existing path busy, by the number of disks in it.

    Where no block device is behind it, as in network file systems, it is that of two disks.
    """
    number = path.stat().st_dev
    device = devices / f"{os.major(number)}:{os.minor(number)}"
    disks = _disks(device) if device.exists() else 2
    return min(_MAX_DEPTH, disks * _DEPTH_OF_A_DISK)


def _disks(device: Path) -> int:
    """Return the number of disks of a block device: more than one for an array."""
    members = [*(device / "slaves").glob("*")]
    return sum(map(_disks, members)) if members else 1


@dataclass(frozen=True)
class Block:
    """Lent memory, and where in it the bytes are once they are read."""

    memory: memoryview
    size_bytes: int
    place: Future[slice]


class DiskQueue:
    """Reads and writes under way, at most `depth` of either kind; a context manager.

    It owns the threads, which end with the block, and the memory, which it lends again and again.
    Blocks that are read and not yet used count as under way.
    """

    def __init__(self, depth: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.depth, self.block_bytes = depth, block_bytes
        self._readers = ThreadPoolExecutor(depth, "disk-read")
        self._writers = ThreadPoolExecutor(depth, "disk-write")
        self._writes = threading.Semaphore(depth)
        self._lock = threading.Lock()
        self._streams = self._ahead_bytes = 0
        self._spare: list[memoryview] = []

    @staticmethod
    def memory_bytes(depth: int, workers: int) -> int:
        """Return the most memory that a queue lends to workers.

        Beside what is read ahead and written behind, each of them uses a block of either of two
        tensors, while a next one of both is read, and fills one to be written.
        """
        return (2 * depth + 5 * workers) * (BLOCK_BYTES + SLACK_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

    def lend(self, size_bytes: int) -> memoryview:
        """Return memory of a size at least, as direct transfers need it."""
        block = self.block_bytes + SLACK_BYTES
        if not SMALL_BYTES <= size_bytes <= block:
            return page_memory(size_bytes)
        with self._lock:
            return self._spare.pop() if self._spare else page_memory(block)

    def take_back(self, memory: memoryview) -> None:
        """Take back lent memory, which nobody uses any more."""
        if len(memory) == self.block_bytes + SLACK_BYTES:
            with self._lock:
                self._spare.append(memory)

    def write(self, action: Callable[[], None]) -> Future[None]:
        """Have an action write, once there is room for it among the writes under way."""
        self._writes.acquire()
        written = self._writers.submit(action)
        written.add_done_callback(lambda _: self._writes.release())
        return written

    def open_stream(self) -> None:
        """Count one more stream among those that share the reads: it has something left to read."""
        with self._lock:
            self._streams += 1

    def close_stream(self) -> None:
        """Count one stream less: all of it is read or being read."""
        with self._lock:
            self._streams -= 1

    @property
    def has_room(self) -> bool:
        """True where more bytes may be read ahead of their use."""
        return self._ahead_bytes < self.depth * self.block_bytes

    def read(self, file: OpenFile, span: range, ahead: int) -> Block | None:
        """Begin to read bytes of a file ahead of their use, for a stream with blocks ahead.

        Returns None where it is the turn of other streams. A stream that has no block ahead never
        waits for its turn.
        """
        with self._lock:
            if ahead and (ahead >= self.depth // self._streams or not self.has_room):
                return None
            self._ahead_bytes += len(span)
        memory = self.lend(len(span) + SLACK_BYTES)
        return Block(memory, len(span), self._begun(file, span, memory))

    def _begun(self, file: OpenFile, span: range, memory: memoryview) -> Future[slice]:
        """Begin a read; a small one of what is in memory already ends here."""
        if len(span) < SMALL_BYTES:
            place = file.read_cached(memory, span.start, span.stop)
            if place is not None:
                done = Future[slice]()
                done.set_result(place)
                return done
        return self._readers.submit(file.read_into, memory, span.start, span.stop)

    def use(self, block: Block) -> None:
        """Count a block no more among those that are ahead: it is used now, or never."""
        with self._lock:
            self._ahead_bytes -= block.size_bytes
