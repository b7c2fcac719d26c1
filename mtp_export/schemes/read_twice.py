"""Rows of tensors that a conversion reads twice: kept in memory where they fit, else read again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.tensors.tensor_reader import TensorReader
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
        self.info, self._stream, self._keeps = stream.info, stream, keeps
        if keeps:
            stream.keep()

    def row_data(self, start: int, stop: int) -> memoryview:
        """Return the bytes of rows [start, stop), the next ones."""
        return self._stream.row_data(start, stop)

    def again(self, opened: ExitStack) -> RowBytes:
        """Return the rows once more; what is opened for it is closed with the stack."""
        if not self._keeps:
            return opened.enter_context(TensorReader(self.info))
        self._stream.rewind()
        return self._stream


def size_of(streams: Sequence[TensorStream]) -> int:
    """Return the bytes of all rows of streams."""
    return sum(stream.info.size_bytes for stream in streams)
