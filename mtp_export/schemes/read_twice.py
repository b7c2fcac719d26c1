"""Rows of tensors that a conversion reads twice: kept in memory where they fit, else read again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.sources.direct_io import copy_bytes, page_memory
from mtp_checkpoints.tensors.tensor_reader import TensorReader, row_bytes
from mtp_checkpoints.tensors.tensor_stream import TensorStream


class RowBytes(Protocol):
    """Rows of one tensor."""

    @property
    def info(self) -> TensorInfo: ...

    def row_data(self, start: int, stop: int) -> memoryview:
        """Return the bytes of rows [start, stop), the next ones."""


class ReadTwice:
    """A tensor's rows as a stream has them, and then all of them once more."""

    def __init__(self, stream: TensorStream, *, keeps: bool) -> None:
        self.info, self._stream = stream.info, stream
        self._kept = page_memory(stream.info.size_bytes) if keeps else None

    def row_data(self, start: int, stop: int) -> memoryview:
        """Return the bytes of rows [start, stop), the next ones."""
        data = self._stream.row_data(start, stop)
        if self._kept is not None:
            first = start * row_bytes(self.info)
            copy_bytes(self._kept[first : first + len(data)], data)
        return data

    def again(self, opened: ExitStack) -> RowBytes:
        """Return the rows once more; what is opened for it is closed with the stack."""
        if self._kept is not None:
            return _Kept(self.info, self._kept)
        return opened.enter_context(TensorReader(self.info))


class _Kept:
    """A tensor's rows in memory."""

    def __init__(self, info: TensorInfo, data: memoryview) -> None:
        self.info, self._data = info, data

    def row_data(self, start: int, stop: int) -> memoryview:
        size = row_bytes(self.info)
        return self._data[start * size : stop * size]


def read_twice(streams: Sequence[TensorStream], budget_bytes: int) -> list[ReadTwice]:
    """Return the rows of streams, which are kept where all of them fit into the memory."""
    keeps = sum(stream.info.size_bytes for stream in streams) <= budget_bytes
    return [ReadTwice(stream, keeps=keeps) for stream in streams]
