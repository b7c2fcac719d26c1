"""Reads one tensor's bytes in pieces: through the page cache, where the kernel reads ahead while a
piece is computed with, or past it, where bytes are read once and only pass by."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from io import FileIO
from typing import TYPE_CHECKING, Any, Self

from mtp_export.checkpoint.direct import (
    DIRECT_LEAST_BYTES,
    PAGE_BYTES,
    open_directly,
    page_memory,
)
from mtp_export.checkpoint.dtypes import torch_dtype
from mtp_export.checkpoint.files import read_failure
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.errors import IoError

if TYPE_CHECKING:
    import torch

_SLACK_BYTES = 2 * PAGE_BYTES  # a piece begins and ends inside a page


def aligned_buffer(piece_bytes: int) -> memoryview:
    """Memory for pieces of a size, which a disk can write into directly."""
    return page_memory(piece_bytes + _SLACK_BYTES)


def read_rows(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of one tensor, when no more of it is wanted."""
    with TensorReader(info) as reader:
        return reader.rows(start, stop)


class TensorReader:
    """One tensor's bytes through one open file; a context manager.

    once: a large tensor that is not in the page cache is read past it, where the file system can:
    to fill the cache can cost more than to read the disk, and evicts what is of use there.
    Every read raises IoError when the bytes run out or cannot be read.
    """

    def __init__(self, info: TensorInfo, *, once: bool = False) -> None:
        self._info = info
        self._unit = 1  # offsets and lengths of reads are multiples of it
        try:
            self._file: FileIO = info.path.open("rb", buffering=0)
            if once and info.size_bytes >= DIRECT_LEAST_BYTES and not self._is_cached():
                self._read_directly()
        except OSError as error:
            raise read_failure(info.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the first dimension, in the stored dtype; a scalar is one row."""
        import torch

        info, dtype = self._info, torch_dtype(self._info.dtype)
        rows = info.shape[0] if info.shape else 1
        row_bytes = info.size_bytes // rows if rows else 0
        size = (stop - start) * row_bytes
        room = torch.empty(size + _SLACK_BYTES + PAGE_BYTES, dtype=torch.uint8)
        buffer: Any = room[-room.data_ptr() % PAGE_BYTES :].numpy()
        place = info.offset_bytes + start * row_bytes
        data = torch.from_numpy(buffer[self._fill(memoryview(buffer), place, place + size)])
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view((stop - start, *info.shape[1:]) if info.shape else ())

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """All bytes in order, in pieces that reuse an aligned_buffer."""
        size = len(buffer) - _SLACK_BYTES
        begin, end = self._info.offset_bytes, self._info.offset_bytes + self._info.size_bytes
        for place in range(begin, end, size):
            yield buffer[self._fill(buffer, place, min(place + size, end))]

    def _fill(self, buffer: memoryview, place: int, end: int) -> slice:
        """Read the file's bytes [place, end), and say where in the buffer they are."""
        try:
            return self._fill_aligned(buffer, place, end)
        except OSError as error:
            if error.errno != errno.EINVAL or self._unit == 1:
                raise read_failure(self._info.path, error) from error
        self._file.close()  # a file system that opens files for direct reading but does none
        self._unit = 1
        try:
            self._file = self._info.path.open("rb", buffering=0)
            return self._fill_aligned(buffer, place, end)
        except OSError as error:
            raise read_failure(self._info.path, error) from error

    def _fill_aligned(self, buffer: memoryview, place: int, end: int) -> slice:
        first = place // self._unit * self._unit
        wanted = end - first
        room = -(-wanted // self._unit) * self._unit
        done = 0
        while done < wanted:
            count = os.preadv(self._file.fileno(), [buffer[done:room]], first + done)
            done += count
            if not count:
                raise IoError(
                    f"Tensor {self._info.name} ends early: the shard shrank while it was read",
                    where=self._info.path,
                )
        return slice(place - first, wanted)

    def _is_cached(self) -> bool:
        """Whether the page cache has the tensor, by two of its bytes.

        To ask for a byte brings it there, so the next reader must ask for others.
        """
        byte, info = [bytearray(1)], self._info
        try:
            for _ in range(2):
                place = info.offset_bytes + random.randrange(info.size_bytes)
                os.preadv(self._file.fileno(), byte, place, os.RWF_NOWAIT)
        except OSError as error:
            return error.errno != errno.EAGAIN
        return True

    def _read_directly(self) -> None:
        directly = open_directly(self._info.path, os.O_RDONLY)
        if directly is None:
            return
        self._file.close()
        self._file, self._unit = FileIO(directly), PAGE_BYTES
