"""Stream of one tensor's bytes: read once and in order, ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Self

from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_reader import as_rows, row_bytes
from mtp_export.errors import IoError

if TYPE_CHECKING:
    import torch


class TensorStream:
    """One tensor's bytes, once and in order, while a queue reads on; a context manager.

    They come in blocks of whole units of as many rows, as large as those of the queue. Every access
    raises IoError, with the tensor's name, when the bytes run out or cannot be read.
    """

    def __init__(self, info: TensorInfo, queue: DiskQueue, unit_rows: int = 0) -> None:
        begin, end = info.offset_bytes, info.offset_bytes + info.size_bytes
        unit = max(1, unit_rows * row_bytes(info))
        step = max(1, queue.block_bytes // unit) * unit
        self._info, self._queue = info, queue
        self._spans = deque(range(at, min(at + step, end)) for at in range(begin, end, step))
        self._under_way: deque[tuple[memoryview, Future[slice]]] = deque()
        self._rest = memoryview(b"")  # of the block in use, whose memory is _lent
        self._lent: memoryview | None = None
        self._file = info.file.open(range(begin, end))
        if self._spans:
            queue.open_stream()
            self._read_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        wait([read for _, read in self._under_way if not read.cancel()])
        for memory, _ in self._under_way:
            self._queue.used()
            self._queue.take_back(memory)
        if self._spans:
            self._queue.close_stream()
        self._give_back()
        self._file.close()

    def blocks(self) -> Iterator[memoryview]:
        """Yield all bytes; a block is there until the next one is asked for."""
        while self._next_block():
            yield self._rest

    def rows(self, count: int) -> torch.Tensor:
        """Return the next rows, of whole units or the last ones, in the stored dtype.

        They are there until others are asked for.
        """
        size = count * row_bytes(self._info)
        if size and not len(self._rest):
            self._next_block()
        data, self._rest = self._rest[:size], self._rest[size:]
        return as_rows(self._info, data, count)

    def _next_block(self) -> bool:
        """Give the block in use back, and wait for the next one; False at the end."""
        self._give_back()
        if not self._under_way:
            return False
        memory, read = self._under_way[0]
        try:
            place = read.result()
        except IoError as error:
            raise _named(error, self._info) from error
        self._under_way.popleft()
        self._queue.used()
        self._lent, self._rest = memory, memory[place]
        self._read_on()
        return True

    def _give_back(self) -> None:
        lent, self._lent = self._lent, None
        self._rest = memoryview(b"")
        if lent is not None:
            self._queue.take_back(lent)

    def _read_on(self) -> None:
        """Begin to read the next blocks, as many as are this stream's share."""
        while self._spans:
            block = self._queue.read(self._file, self._spans[0], len(self._under_way))
            if block is None:
                return
            self._spans.popleft()
            self._under_way.append(block)
            if not self._spans:
                self._queue.close_stream()


def _named(error: IoError, tensor: TensorInfo) -> IoError:
    """Return an error that says which tensor was being read."""
    return IoError(
        f"{error.what}, at tensor {tensor.name}",
        where=error.where,
        expected=error.expected,
        found=error.found,
        todo=error.todo,
    )
