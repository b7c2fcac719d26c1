"""Streaming writer of shards: header first, then tensors at known offsets, in any order and from
any thread, behind the threads that compute. The file gets its name only when it is whole and on
disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mtp_export.checkpoint.direct_io import (
    MIN_DIRECT_BYTES,
    PAGE_BYTES,
    copy_bytes,
    open_directly,
)
from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.files import (
    NEW_FILE,
    sync_folder,
    temporary_path,
    write_all,
    write_failure,
)
from mtp_export.checkpoint.plan import OutputTensor

_ALIGNMENT_BYTES = 8
WRITE_BUFFER_BYTES = 4 << 20


def encode_header(tensors: Sequence[OutputTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a shard, its length before it, and every tensor's offset in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT_BYTES)
    head = len(raw).to_bytes(8, "little") + raw
    offsets = {
        tensor.name: len(head) + entries[tensor.name]["data_offsets"][0] for tensor in tensors
    }
    return head, offsets


class _WriteBuffer:
    """The next bytes of one tensor, in lent memory aligned as the pages of the file are."""

    def __init__(self, place: int, lent: memoryview, size_bytes: int) -> None:
        self.lent, self.memory = lent, lent[:size_bytes]
        self.page = place // PAGE_BYTES * PAGE_BYTES  # where in the file the memory begins
        self.start = self.end = place - self.page

    def take(self, data: memoryview) -> memoryview:
        """Take what there is room for; return the rest."""
        count = min(len(data), len(self.memory) - self.end)
        copy_bytes(self.memory[self.end : self.end + count], data[:count])
        self.end += count
        return data[count:]


class ShardWriter:
    """One shard being written. commit() makes the file appear, discard() leaves no trace.

    Several threads may call write(), each for tensors of its own. The whole pages of a large tensor
    bypass the page cache, and a queue writes them later: a failure is raised by the next call of
    write() or by commit(). All methods raise IoError.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor], queue: DiskQueue) -> None:
        self.path = path
        self._queue = queue
        self._temporary = temporary_path(path)
        self._head, self._places = encode_header(tensors)
        self._left = {tensor.name: tensor.size_bytes for tensor in tensors}
        self.size_bytes = len(self._head) + sum(self._left.values())
        self._buffers: dict[str, _WriteBuffer] = {}
        self._under_way: set[Future[None]] = set()
        self._failure: BaseException | None = None  # of a write under way, the first
        self._fd: int | None = None
        self._direct_fd: int | None = None
        self._is_direct = False
        try:
            self._fd = os.open(self._temporary, NEW_FILE, 0o666)
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            write_all(self._fd, self._head, 0)
            self._direct_fd = open_directly(self._temporary, os.O_WRONLY)
            self._is_direct = self._direct_fd is not None
        except OSError as error:
            self.discard()
            raise write_failure(path, error) from error

    def write(self, name: str, data: memoryview) -> None:
        """Write the next bytes of a tensor; they may wait in a buffer until its last ones come."""
        try:
            self._check()
            if name in self._buffers or self._left[name] >= MIN_DIRECT_BYTES:
                self._buffer(name, data)
            else:
                self._write_cached(data, self._places[name])
                self._places[name] += len(data)
                self._left[name] -= len(data)
        except OSError as error:
            raise write_failure(self.path, error) from error

    def _check(self) -> None:
        """Raise what kept a write from being done that was put off."""
        if self._failure is not None:
            raise self._failure

    def _buffer(self, name: str, data: memoryview) -> None:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = self._new_buffer(self._places[name])
        self._left[name] -= len(data)
        while len(data := buffer.take(data)):
            self._put_off(buffer)
            place = buffer.page + len(buffer.memory)
            buffer = self._buffers[name] = self._new_buffer(place)
        if not self._left[name]:
            self._put_off(self._buffers.pop(name))

    def _new_buffer(self, place: int) -> _WriteBuffer:
        return _WriteBuffer(place, self._queue.lend(WRITE_BUFFER_BYTES), WRITE_BUFFER_BYTES)

    def _put_off(self, buffer: _WriteBuffer) -> None:
        """Have a buffer written later; this waits where too many are already."""
        future = self._queue.write(partial(self._put, buffer))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)

    def _put(self, buffer: _WriteBuffer) -> None:
        """Write a buffer: whole pages directly, parts of pages through the page cache."""
        memory, page, start, end = buffer.memory, buffer.page, buffer.start, buffer.end
        first = min(-(-start // PAGE_BYTES) * PAGE_BYTES, end)
        last = max(end // PAGE_BYTES * PAGE_BYTES, first)
        try:
            if self._failure is None:
                self._write_cached(memory[start:first], page + start)
                self._write_pages(memory[first:last], page + first)
                self._write_cached(memory[last:end], page + last)
        except BaseException as error:
            self._failure = error
        finally:
            self._queue.take_back(buffer.lent)

    def _write_pages(self, data: memoryview, position: int) -> None:
        """Write past the page cache, or through it where the file system does not support that."""
        while len(data) and self._is_direct and self._direct_fd is not None:
            try:
                count = os.pwrite(self._direct_fd, data, position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
            else:
                data, position = data[count:], position + count
        self._write_cached(data, position)

    def _write_cached(self, data: memoryview, position: int) -> None:
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
            self._temporary.unlink(missing_ok=True)

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
