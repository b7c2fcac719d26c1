"""Arenas in files: what a process packed is mapped by the next one, and by others beside it.

A file holds what was taken, from chunk to chunk as it was taken, then the numbers that were noted
as JSON, the bytes of these (8, little-endian) and a mark. It has its name only once it is whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mtp_kernels.cpu.memory import Arena

CHUNK_BYTES = 1 << 30
_MARK = b"mtp-export/packed/1\n"
_LENGTH_BYTES = 8
_TAIL_BYTES = _LENGTH_BYTES + len(_MARK)
_READ_BYTES = 1 << 24  # that one thread reads at a time
_POPULATE_READ = 22  # of Linux's madvise: map pages, and read those that are not in memory


class PackedFileError(ValueError):
    """A file that is not whole, or holds other weights than are taken from it."""


class WrittenArena(Arena):
    """Arena in a new file, which another process may take from once it is kept."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd, self._size_bytes = fd, 0
        self._numbers: list[int] = []

    def noted(self, number: int) -> int:
        """Note a number."""
        self._numbers.append(number)
        return number

    def finish(self) -> None:
        """Cut what was not taken off the file, write the numbers behind it, and wait for the disk
        (OSError)."""
        used = self._size_bytes - self._chunk.nbytes
        numbers = json.dumps(self._numbers).encode()
        os.ftruncate(self._fd, used)
        end = numbers + len(numbers).to_bytes(_LENGTH_BYTES, "little") + _MARK
        os.pwrite(self._fd, end, used)
        os.fsync(self._fd)

    def _more(self, count: int) -> np.ndarray:
        start, size = self._size_bytes, _chunk_bytes(count)
        os.posix_fallocate(self._fd, start, size)  # a full disk is an error here, not a signal
        self._size_bytes += size
        return np.frombuffer(mmap.mmap(self._fd, size, offset=start), np.float32)


class FilledArena(Arena):
    """Arena in a file that was kept: takes and notes are answered in the order of its making.

    Raises OSError for a file that cannot be read, PackedFileError for one that is not whole.
    """

    is_filled = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _TAIL_BYTES:
                raise PackedFileError(f"{size} bytes")
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        tail = self._memory[-_TAIL_BYTES:]
        length = int.from_bytes(tail[:_LENGTH_BYTES], "little")
        self._start, self._end = 0, size - _TAIL_BYTES - length
        if tail[_LENGTH_BYTES:] != _MARK or self._end < 0:
            raise PackedFileError("no numbers at its end")
        numbers = self._memory[self._end : size - _TAIL_BYTES]
        self._numbers: Iterator[int] = iter(json.loads(numbers))

    def noted(self, number: int) -> int:
        """Return the next number (PackedFileError where there is none)."""
        for one in self._numbers:
            return one
        raise PackedFileError("fewer numbers than are asked for")

    def check_taken(self) -> None:
        """Raise PackedFileError unless all was taken, and every number was asked for."""
        left = len(self._chunk) if self._start >= self._end else -1
        if left or next(self._numbers, None) is not None:
            raise PackedFileError("it holds more than was taken")

    def read(self, pool: Executor, advance: Callable[[int], object]) -> None:
        """Read the file into memory, several parts at a time; advance takes the bytes of each."""
        parts = range(0, self._end, _READ_BYTES)
        for size in pool.map(self._read, parts):
            advance(size)

    def _read(self, start: int) -> int:
        size = min(_READ_BYTES, self._end - start)
        page = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        address = np.frombuffer(self._memory, np.uint8).ctypes.data + start
        library = ctypes.CDLL(None)
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(page), _POPULATE_READ)
        return size

    def _more(self, count: int) -> np.ndarray:
        start, size = self._start, _chunk_bytes(count)
        self._start += size
        stop = min(self._start, self._end)
        if stop - start < 4 * count:
            raise PackedFileError("it holds less than is taken")
        return np.frombuffer(self._memory, np.float32, (stop - start) // 4, start)


@contextmanager
def written_file(path: Path) -> Iterator[WrittenArena | None]:
    """Make an arena in a file that has its name once the block ends, or yield None where another
    process is making it; nothing is left of one that fails (OSError)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not part.exists() or part.stat().st_ino != os.fstat(fd).st_ino:  # kept meanwhile
            yield None
            return
        try:
            os.ftruncate(fd, 0)  # of a process that ended before it was whole
            arena = WrittenArena(fd)
            yield arena
            arena.finish()
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # which mappings would keep
    finally:
        os.close(fd)


def _chunk_bytes(count: int) -> int:
    return -(-max(4 * count, CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
