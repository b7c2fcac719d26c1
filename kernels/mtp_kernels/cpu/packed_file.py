"""Arenas in files: what a process packed is mapped by the next one, and by others beside it.

A file holds what was taken, from chunk to chunk as it was taken, then the numbers that were noted
as JSON, the bytes of these (8, little-endian) and a mark. It has its name only once it is whole.
"""

from __future__ import annotations

import ctypes
import errno
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

PART = ".part"  # behind the name of a file that is not whole yet
CHUNK_BYTES = 1 << 30
_MARK = b"mtp-export/packed/1\n"
_LENGTH_BYTES = 8
_TAIL_BYTES = _LENGTH_BYTES + len(_MARK)
_READ_BYTES = 1 << 24  # that one thread reads at a time
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_POPULATE_READ = 22  # of Linux's madvise: map pages, and read those that are not in memory


class PackedFileError(ValueError):
    """A file that is not whole, or holds other weights than are taken from it."""


class PackedIoError(OSError):
    """A file that cannot be read or written."""


class FileArena(Arena):
    """Arena in a file until that is whole; what is taken later is in new memory."""

    _is_open = True

    def close(self) -> None:
        """Take nothing from the file any more."""
        self._is_open, self._chunk = False, self._chunk[:0]

    def _more(self, count: int) -> np.ndarray:
        return self._from_file(count) if self._is_open else super()._more(count)

    def _from_file(self, count: int) -> np.ndarray:
        """Return the file's next chunk."""
        raise NotImplementedError


class WrittenArena(FileArena):
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
        (PackedIoError)."""
        used = self._size_bytes - self._chunk.nbytes
        self.close()
        numbers = json.dumps(self._numbers).encode()
        end = numbers + len(numbers).to_bytes(_LENGTH_BYTES, "little") + _MARK
        with _told():
            os.ftruncate(self._fd, used)
            if os.pwrite(self._fd, end, used) < len(end):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._fd)

    def _from_file(self, count: int) -> np.ndarray:
        start, size = self._size_bytes, _chunk_bytes(count, self._size_bytes)
        with _told():
            os.posix_fallocate(self._fd, start, size)  # a full disk is an error here, not a signal
            memory = mmap.mmap(self._fd, size, offset=start)
        self._size_bytes += size
        return np.frombuffer(memory, np.float32)


class FilledArena(FileArena):
    """Arena in a file that was kept: takes and notes are answered in the order of its making.

    Raises PackedIoError for one that cannot be read, or is not there, PackedFileError for one that
    is not whole.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        with _told(), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _TAIL_BYTES:
                raise PackedFileError(f"{size} bytes")
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        tail = self._memory[-_TAIL_BYTES:]
        length = int.from_bytes(tail[:_LENGTH_BYTES], "little")
        self._start, self._end = 0, size - _TAIL_BYTES - length
        if tail[_LENGTH_BYTES:] != _MARK or self._end < 0:
            raise PackedFileError("no numbers at its end")
        try:
            numbers = json.loads(self._memory[self._end : size - _TAIL_BYTES])
        except ValueError as error:
            raise PackedFileError("damaged numbers") from error
        self._numbers: Iterator[int] = iter(numbers)

    @property
    def is_filled(self) -> bool:
        return self._is_open

    def noted(self, number: int) -> int:
        """Return the next number (PackedFileError where there is none)."""
        if not self._is_open:
            return number
        for one in self._numbers:
            return one
        raise PackedFileError("fewer numbers than are asked for")

    def check_taken(self) -> None:
        """Close it; raise PackedFileError unless all was taken, and every number asked for."""
        left = len(self._chunk) if self._start >= self._end else -1
        self.close()
        if left or next(self._numbers, None) is not None:
            raise PackedFileError("it holds more than was taken")

    def read(self, pool: Executor, advance: Callable[[int], object]) -> None:
        """Read the file into memory, several parts at a time; advance takes the bytes of each
        (PackedIoError)."""
        for size in pool.map(self._read, range(0, self._end, _READ_BYTES)):
            advance(size)

    def _read(self, start: int) -> int:
        size = min(_READ_BYTES, self._end - start)
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        at = ctypes.c_void_p(np.frombuffer(self._memory, np.uint8).ctypes.data + start)
        if _LIBRARY.madvise(at, ctypes.c_size_t(pages), _POPULATE_READ):
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # which systems without it say
                raise PackedIoError(number, os.strerror(number))
            self._memory[start : start + size]  # read by a copy
        return size

    def _from_file(self, count: int) -> np.ndarray:
        start, size = self._start, _chunk_bytes(count, self._start)
        self._start += size
        stop = min(self._start, self._end)
        if stop - start < 4 * count:
            raise PackedFileError("it holds less than is taken")
        return np.frombuffer(self._memory, np.float32, (stop - start) // 4, start)


@contextmanager
def written_file(path: Path) -> Iterator[WrittenArena | None]:
    """Make an arena in a file that has its name once the block ends, or yield None where another
    process is making it; nothing is left of one that fails (PackedIoError)."""
    with _told():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + PART)
        fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _is_own(part, fd):
            yield None
            return
        try:
            with _told():
                os.ftruncate(fd, 0)  # of a process that ended before it was whole
            arena = WrittenArena(fd)
            yield arena
            arena.finish()
            with _told():
                part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # which mappings would keep
    finally:
        os.close(fd)


def remove_left(part: Path) -> None:
    """Remove what a process left that ended before its file was whole, unless one is writing it."""
    with suppress(OSError), part.open("rb+") as file:
        if _is_own(part, file.fileno()):
            part.unlink()


def _is_own(part: Path, fd: int) -> bool:
    """Lock a file that was opened; False where another process has, or has given it its name."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return part.stat().st_ino == os.fstat(fd).st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


@contextmanager
def _told() -> Iterator[None]:
    """Raise PackedIoError for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise PackedIoError(error.errno, error.strerror) from error


def _chunk_bytes(count: int, start: int) -> int:
    """Return the bytes of a chunk for so many floats: of large files larger ones, since each keeps
    the file open."""
    return -(-max(4 * count, CHUNK_BYTES, start // 16) // mmap.PAGESIZE) * mmap.PAGESIZE
