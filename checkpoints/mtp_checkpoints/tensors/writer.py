"""Streaming writer of shards: header first, then tensors at known offsets, in any order and from
any thread, behind the threads that compute. The file gets its name only when it is whole and on
disk."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

from mtp_checkpoints.containers.base import FileLayout
from mtp_checkpoints.sources.direct_io import (
    MIN_DIRECT_BYTES,
    PAGE_BYTES,
    copy_bytes,
    open_directly,
    page_memory,
)
from mtp_checkpoints.sources.disk_queue import BLOCK_BYTES, SMALL_BYTES, DiskQueue
from mtp_checkpoints.sources.files import (
    NEW_FILE,
    sync_folder,
    temporary_path,
    write_all,
    write_failure,
)

WRITE_BUFFER_BYTES = BLOCK_BYTES


class _WriteBuffer:
    """The next bytes of one tensor, in lent memory aligned as the pages of the file are."""

    def __init__(self, place: int, left_bytes: int, queue: DiskQueue) -> None:
        self.page = place // PAGE_BYTES * PAGE_BYTES  # where in the file the memory begins
        self.start = self.end = place - self.page
        size = min(WRITE_BUFFER_BYTES, self.start + left_bytes)
        self.lent = queue.lend(size)
        self.memory = self.lent[:size]

    def take(self, data: memoryview) -> memoryview:
        """Take what there is room for; return the rest."""
        count = min(len(data), len(self.memory) - self.end)
        copy_bytes(self.memory[self.end : self.end + count], data[:count])
        self.end += count
        return data[count:]


class _SharedPages:
    """Pages of a file that several tensors share, until the last of their bytes has come.

    Pages that are written in parts go through the page cache, and one such write waits for all
    direct ones of its file, and those after it for that.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._pages: dict[int, tuple[memoryview, int]] = {}  # by place, with the bytes to come

    def fill(self, place: int, data: bytes | memoryview) -> tuple[int, memoryview] | None:
        """Put bytes into their page; return it with its place when it is whole."""
        page = place // PAGE_BYTES * PAGE_BYTES
        size = min(PAGE_BYTES, self._size_bytes - page)
        with self._lock:
            if page not in self._pages:
                self._pages[page] = page_memory(PAGE_BYTES)[:size], size
            memory, left = self._pages.pop(page)
            memory[place - page : place - page + len(data)] = data
            if left > len(data):
                self._pages[page] = memory, left - len(data)
                return None
            return page, memory


class ShardWriter:
    """One shard being written. commit() makes the file appear, discard() leaves no trace.

    Several threads may call write(), each for tensors of its own. The pages of a large shard of
    large tensors bypass the page cache. A queue writes later what is not small: a failure is raised
    by the next call of write() or by commit(). All methods raise IoError.
    """

    def __init__(self, path: Path, layout: FileLayout, queue: DiskQueue) -> None:
        self.path, self.size_bytes = path, layout.size_bytes
        self._queue = queue
        self._temporary = temporary_path(path)
        self._places = {name: place.start for name, place in layout.places.items()}
        self._left = {name: len(place) for name, place in layout.places.items()}
        self._buffers: dict[str, _WriteBuffer] = {}
        self._shared = _SharedPages(self.size_bytes)
        self._under_way: set[Future[None]] = set()
        self._failure: BaseException | None = None  # of a write under way
        self._fd: int | None = None
        self._direct_fd: int | None = None
        self._is_direct = False
        try:
            self._fd = os.open(self._temporary, NEW_FILE, 0o666)
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            if self.size_bytes >= max(MIN_DIRECT_BYTES, SMALL_BYTES * len(layout.places)):
                self._direct_fd = open_directly(self._temporary, os.O_WRONLY)
            self._is_direct = self._direct_fd is not None
            memory = page_memory(len(layout.head))
            memory[:] = layout.head
            self._write(0, memory)
            self._fill_gaps(layout)
        except OSError as error:
            self.discard()
            raise write_failure(path, error) from error

    def _fill_gaps(self, layout: FileLayout) -> None:
        """Write the zeros of no tensor: pages are written when all of their bytes have come."""
        tensors_bytes = sum(map(len, layout.places.values()))
        if len(layout.head) + tensors_bytes == layout.size_bytes:
            return
        position = len(layout.head)
        ends = [*layout.places.values(), range(layout.size_bytes, layout.size_bytes)]
        for place in sorted(ends, key=lambda place: (place.start, place.stop)):
            if position < place.start:
                first = position % PAGE_BYTES
                self._write(position, page_memory(first + place.start - position)[first:])
            position = place.stop

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor; they may wait in a buffer until its last ones come."""
        assert len(data) <= self._left[name], f"{name} has fewer bytes than it is given"
        try:
            self._check()
            while len(data):
                data = self._buffer(name, data)
        except OSError as error:
            raise write_failure(self.path, error) from error

    def _check(self) -> None:
        """Raise what kept a write from being done that was put off."""
        if self._failure is not None:
            raise self._failure

    def _buffer(self, name: str, data: memoryview) -> memoryview:
        """Take bytes of a tensor into its buffer, and have it written when it is full or they are
        the last ones; return the rest."""
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = _WriteBuffer(self._places[name], self._left[name], self._queue)
            self._buffers[name] = buffer
        rest = buffer.take(data)
        self._places[name] += len(data) - len(rest)
        self._left[name] -= len(data) - len(rest)
        if buffer.end == len(buffer.memory):
            self._put_off(self._buffers.pop(name))
        return rest

    def _put_off(self, buffer: _WriteBuffer) -> None:
        """Have a buffer written later; this waits where too many are already. What the page cache
        takes in less time than another thread is written now."""
        if not self._is_direct and len(buffer.memory) < SMALL_BYTES:
            self._put(buffer)
            return
        future = self._queue.write(partial(self._put, buffer))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def _put(self, buffer: _WriteBuffer) -> None:
        """Write a buffer, unless another one could not be written."""
        try:
            if self._failure is None:
                self._write(buffer.page + buffer.start, buffer.memory[buffer.start : buffer.end])
        except BaseException as error:
            self._failure = error
        finally:
            self._queue.take_back(buffer.lent)

    def _write(self, place: int, data: memoryview) -> None:
        """Write bytes in memory that is aligned as their place is: whole pages, and those that
        others have a part of with their last part."""
        end = place + len(data)
        first = min(-(-place // PAGE_BYTES) * PAGE_BYTES, end)
        last = max(end // PAGE_BYTES * PAGE_BYTES, first)
        self._write_pages(data[first - place : last - place], first)
        for start, stop in ((place, first), (last, end)):
            if start < stop:
                page = self._shared.fill(start, data[start - place : stop - place])
                if page is not None:
                    self._write_pages(page[1], page[0])

    def _write_pages(self, data: memoryview, position: int) -> None:
        """Write past the page cache, or through it where the file system does not support that, and
        what is left of the file's last page."""
        while len(data) >= PAGE_BYTES and self._is_direct and self._direct_fd is not None:
            try:
                count = os.pwrite(self._direct_fd, data, position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
            else:
                data, position = data[count:], position + count
        assert self._fd is not None
        write_all(self._fd, data, position)

    def commit(self) -> None:
        """Bring the file to disk and give it its name."""
        assert self._fd is not None
        try:
            self._settle()
            self._check()
            os.fsync(self._fd)
            self._close()
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            self.discard()
            raise write_failure(self.path, error) from error

    def discard(self) -> None:
        """Close and remove what was written; harmless when nothing was.

        Failures are ignored: they would hide the error that led here.
        """
        self._settle()
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._temporary.unlink()

    def _settle(self) -> None:
        """Wait until no write is under way."""
        wait(set(self._under_way))

    def _close(self) -> None:
        direct, self._direct_fd = self._direct_fd, None
        fd, self._fd = self._fd, None
        try:
            if direct is not None:
                os.close(direct)
        finally:
            if fd is not None:
                os.close(fd)
