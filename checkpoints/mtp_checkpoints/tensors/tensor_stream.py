"""Stream of one tensor's bytes: read once and in order, ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Self

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.direct_io import copy_bytes, page_memory
from mtp_checkpoints.sources.disk_queue import Block, DiskQueue
from mtp_checkpoints.tensors.tensor_reader import as_rows, row_bytes

if TYPE_CHECKING:
    import torch


# Blocks have whole multiples of so many rows, if they can: converters take rows in such multiples,
# and what lies in one block need not be copied together.
_UNIT_ROWS = 128


class TensorStream:
    """One tensor's bytes, once and in order, while a queue reads on; a context manager.

    Where they are kept they are there once more, in the memory that they were read into.

    Every access raises IoError, with the tensor's name, when the bytes run out or cannot be read.
    """

    def __init__(self, info: TensorInfo, queue: DiskQueue) -> None:
        begin, end = info.offset_bytes, info.offset_bytes + info.size_bytes
        unit = max(1, _UNIT_ROWS * row_bytes(info))
        step = queue.block_bytes // unit * unit or queue.block_bytes
        self.info, self._queue = info, queue
        self._spans = deque(range(at, min(at + step, end)) for at in range(begin, end, step))
        self._ahead: deque[Block] = deque()
        self._kept: deque[tuple[memoryview, memoryview]] | None = None  # lent, and what was read
        self._again = deque[tuple[memoryview, memoryview]]()
        self._used: tuple[memoryview, memoryview] | None = None
        self._rest = memoryview(b"")  # of the lent memory, what is still to be used
        self._file = info.file.open(range(begin, end))
        if self._spans:
            queue.open_stream()
            self._read_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        wait([block.place for block in self._ahead if not block.place.cancel()])
        for block in self._ahead:
            self._queue.use(block)
            self._queue.take_back(block.memory)
        if self._spans:
            self._queue.close_stream()
        self._give_back()
        for memory, _ in (*(self._kept or ()), *self._again):
            self._queue.take_back(memory)
        self._file.close()

    def keep(self) -> None:
        """Keep what is used from now on, until it is used once more."""
        self._kept = deque()

    def rewind(self) -> None:
        """Go back to where all that is kept begins, from the end."""
        assert self._kept is not None and not self._ahead
        self._give_back()
        self._again, self._kept = self._kept, None

    def blocks(self) -> Iterator[memoryview]:
        """Yield all bytes; a block is there until the next one is asked for."""
        while self._next_block():
            yield self._rest

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the first dimension, the next ones, in the stored dtype.

        They are there until others are asked for.
        """
        return as_rows(self.info, self.row_data(start, stop), stop - start)

    def row_data(self, start: int, stop: int) -> memoryview:
        """Return the bytes of the same rows."""
        return self._next_bytes((stop - start) * row_bytes(self.info))

    def _next_bytes(self, count: int) -> memoryview:
        if not len(self._rest) and count:
            self._next_block()
        if count <= len(self._rest):
            data, self._rest = self._rest[:count], self._rest[count:]
            return data
        whole, done = page_memory(count), 0
        while done < count and (len(self._rest) or self._next_block()):
            part = self._rest[: count - done]
            copy_bytes(whole[done : done + len(part)], part)
            done, self._rest = done + len(part), self._rest[len(part) :]
        return whole[:done]

    def _next_block(self) -> bool:
        """Give the block in use back, and wait for the next one; False at the end."""
        self._give_back()
        if self._again:
            self._used = _, self._rest = self._again.popleft()
            return True
        if not self._ahead:
            return False
        block = self._ahead[0]
        try:
            place = block.place.result()
        except IoError as error:
            raise _named(error, self.info) from error
        self._ahead.popleft()
        self._queue.use(block)
        self._used = _, self._rest = block.memory, block.memory[place]
        self._read_on()
        return True

    def _give_back(self) -> None:
        used, self._used = self._used, None
        self._rest = memoryview(b"")
        if used is not None and self._kept is not None:
            self._kept.append(used)
        elif used is not None:
            self._queue.take_back(used[0])

    def _read_on(self) -> None:
        """Begin to read the next blocks, as many as are this stream's share."""
        while self._spans:
            block = self._queue.read(self._file, self._spans[0], len(self._ahead))
            if block is None:
                return
            self._ahead.append(block)
            self._spans.popleft()
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
