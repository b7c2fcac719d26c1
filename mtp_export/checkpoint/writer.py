"""The streaming shard writer: header first, tensors at known offsets in any order and from any
thread, and a file that gets its name only when it is whole and on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtp_export.checkpoint.files import sync_folder, temporary_path, write_failure
from mtp_export.checkpoint.plan import OutputTensor

_ALIGNMENT_BYTES = 8
_STRETCH_BYTES = 32 << 20
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


def encode_header(tensors: Sequence[OutputTensor]) -> tuple[bytes, dict[str, int]]:
    """Length and header of a shard, and every tensor's offset in the file."""
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


class ShardWriter:
    """One shard being written. commit() makes it appear, discard() leaves no trace.

    write() may be called from several threads; the OSErrors of all methods come out as IoError.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]) -> None:
        self.path = path
        self._temporary = temporary_path(path)
        self._head, self._offsets = encode_header(tensors)
        self.size_bytes = len(self._head) + sum(tensor.size_bytes for tensor in tensors)
        self._fd: int | None = None
        try:
            self._fd = os.open(self._temporary, _OPEN_FLAGS, 0o666)
            os.posix_fallocate(self._fd, 0, self.size_bytes)
            self._write_all(memoryview(self._head), 0)
        except OSError as error:
            self.discard()
            raise write_failure(path, error) from error

    def write(self, name: str, offset_bytes: int, data: memoryview) -> None:
        """Put bytes at an offset inside a tensor."""
        start = self._offsets[name] + offset_bytes
        try:
            self._write_all(data, start)
            self._send_off(start, start + len(data))
        except OSError as error:
            raise write_failure(self.path, error) from error

    def _send_off(self, start: int, end: int) -> None:
        """Have the kernel begin to write out the stretch of the file that these bytes completed.

        Otherwise it waits until memory is full of unwritten data, and commit() waits for the disk.
        """
        assert self._fd is not None
        first, last = start // _STRETCH_BYTES, end // _STRETCH_BYTES
        if last > first:
            length = (last - first) * _STRETCH_BYTES
            os.posix_fadvise(self._fd, first * _STRETCH_BYTES, length, os.POSIX_FADV_DONTNEED)

    def _write_all(self, data: memoryview, position: int) -> None:
        assert self._fd is not None
        while len(data):
            count = os.pwrite(self._fd, data, position)
            data, position = data[count:], position + count

    def commit(self) -> None:
        """Bring the file to disk and give it its name."""
        assert self._fd is not None
        try:
            os.fsync(self._fd)
            fd, self._fd = self._fd, None
            os.close(fd)
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            self.discard()
            raise write_failure(self.path, error) from error

    def discard(self) -> None:
        """Close and remove what was written, as far as the disk lets it; harmless when nothing was.

        A failure here would hide the one that led here.
        """
        with suppress(OSError):
            if self._fd is not None:
                fd, self._fd = self._fd, None
                os.close(fd)
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)
