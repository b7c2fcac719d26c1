"""Reader of one tensor's rows, any of them in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import held_shape, tensor_bytes, torch_dtype
from mtp_checkpoints.sources.direct_io import PAGE_BYTES, SLACK_BYTES
from mtp_checkpoints.sources.disk_queue import SMALL_BYTES

if TYPE_CHECKING:
    import torch


def read_rows(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of one tensor, when no more of it is wanted."""
    with TensorReader(info) as reader:
        return reader.rows(start, stop)


def row_bytes(info: TensorInfo) -> int:
    """Return the size of one row of the first dimension; a scalar is one row."""
    rows = info.shape[0] if info.shape else 1
    return info.size_bytes // rows if rows else 0


def as_rows(info: TensorInfo, data: memoryview, count: int) -> torch.Tensor:
    """Return bytes of a number of its rows as a tensor, in the stored dtype and in place if they
    are aligned to it; of a scalar, one of shape ()."""
    import numpy as np
    import torch

    array: Any = np.asarray(data)
    dtype, values = torch_dtype(info.dtype), torch.from_numpy(array)
    if values.data_ptr() % dtype.itemsize:
        values = values.clone()
    return values.view(dtype).view((count, *_held(info)[1:]) if info.shape else ())


def as_array(info: TensorInfo, data: memoryview, count: int) -> Any:
    """Return bytes of a number of its rows as an array of its dtype's array_name, in place if they
    are aligned to it."""
    import numpy as np

    array = np.frombuffer(data, info.dtype.array_name)
    aligned = array if array.flags.aligned else array.copy()
    return aligned.reshape(count, *_held(info)[1:])


def _held(info: TensorInfo) -> tuple[int, ...]:
    return held_shape(info.dtype, info.shape)


class TensorReader:
    """One tensor's bytes through one open file; a context manager.

    once: every byte will be read once and only pass by, so caches need not keep it. Every read
    raises IoError when the bytes run out or cannot be read.
    """

    def __init__(self, info: TensorInfo, *, once: bool = False) -> None:
        self.info = info
        self._begin, self._end = info.offset_bytes, info.offset_bytes + info.size_bytes
        self._file = info.file.open(range(self._begin, self._end) if once else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the first dimension, in the stored dtype.

        A scalar is one row, and comes as a tensor of shape ().
        """
        return as_rows(self.info, self.row_data(start, stop), stop - start)

    def row_data(self, start: int, stop: int) -> memoryview:
        """Return the bytes of the same rows."""
        size = row_bytes(self.info)
        first, last = self._begin + start * size, self._begin + stop * size
        if last - first < SMALL_BYTES:
            return memoryview(bytearray(self._file.read(first, last)))
        buffer = _unfilled(last - first + SLACK_BYTES)
        return buffer[self._file.read_into(buffer, first, last)]

    def window(self, rows: range, columns: range) -> torch.Tensor:
        """Return some columns of some rows of a matrix, in the stored dtype; others are not read.

        Columns that are not all are one read per row. Those of blocks are whole ones.
        """
        import torch

        info = self.info
        if len(columns) == info.shape[1]:
            return self.rows(rows.start, rows.stop)
        before, width = (
            tensor_bytes(info.dtype, (count,)) for count in (columns.start, len(columns))
        )
        buffer = _unfilled(width + SLACK_BYTES)
        held = held_shape(info.dtype, (len(rows), len(columns)))
        out = torch.empty(held, dtype=torch_dtype(info.dtype))
        lines: Any = out.view(torch.uint8).numpy()
        for line, row in zip(lines, rows, strict=True):
            first = self._begin + row * row_bytes(info) + before
            line[:] = buffer[self._file.read_into(buffer, first, first + width)]
        return out


def _unfilled(size_bytes: int) -> memoryview:
    """Return memory that begins at a page, of any content: what one read is done with serves the
    next, where the system would clear each page."""
    import numpy as np

    memory: Any = np.empty(size_bytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memoryview(memory)[start : start + size_bytes]
