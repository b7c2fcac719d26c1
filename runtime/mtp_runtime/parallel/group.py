"""Group of the processes, or ranks, that run or train one model together: everything that they
exchange.

Every rank runs the same program, so that each meets the others in the same collectives in the same
order. What is decided outside of it, as the requests of a step, is rank 0's, which tells the
others.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from mtp_checkpoints.errors import IoError, UnsupportedError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MESSAGE_BYTES = 16384  # of what rank 0 tells: more takes a second broadcast
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Split:
    """Division of rows, heads, experts or tokens into one consecutive part per rank."""

    rank: int = 0
    size: int = 1

    def parts(self, total: int) -> list[range]:
        """Return every rank's part of [0, total)."""
        ends = [rank * total // self.size for rank in range(self.size + 1)]
        return [range(ends[rank], ends[rank + 1]) for rank in range(self.size)]

    def nonempty_parts(self, total: int, what: str) -> list[range]:
        """Return every rank's part of what each must have some of (UnsupportedError for more ranks
        than that)."""
        if total < self.size:
            raise UnsupportedError(
                f"There are more processes than {what} to divide among them",
                expected=f"at most {total} processes",
                found=self.size,
            )
        return self.parts(total)

    def part(self, total: int) -> range:
        """Return the own part of [0, total)."""
        return self.parts(total)[self.rank]

    def sizes(self, total: int) -> list[int]:
        """Return the size of every rank's part."""
        return [len(part) for part in self.parts(total)]


@dataclass(frozen=True)
class Part:
    """The own part of a matrix that the ranks have side by side (dim 1) or one after the other (dim
    0); sizes are every rank's in this dimension."""

    own: torch.Tensor  # [T, d]
    sizes: Sequence[int]
    dim: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shape of every rank's part."""
        rows, columns = self.own.shape
        return [(rows, size) if self.dim else (size, columns) for size in self.sizes]


class _Ended(Exception):
    """Rank 0 has told the others to end."""


class Group:
    """Ranks that run or train one model together; of size 1 it does nothing.

    calls counts the collectives by name.
    """

    def __init__(self, split: Split | None = None, device: torch.device | None = None) -> None:
        self.split = split or Split()
        self.calls: Counter[str] = Counter()
        self._device = device or torch.device("cpu")
        self._in_step = True  # False once a failure ended what all ranks were doing

    @property
    def rank(self) -> int:
        return self.split.rank

    @property
    def size(self) -> int:
        return self.split.size

    @property
    def is_one(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True for the rank that decides, writes files and shows progress."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Return the local device of a kind: of several accelerators of a machine, each has one."""
        return str(self._device) if name == self._device.type else name

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Run rank 0's program while the others follow; they end with it in peace, unless it fails
        amid something that all ranks do."""
        try:
            yield
        finally:
            if not self.is_one and self._in_step:
                self._send(None)

    def follow(self) -> None:
        """Run what rank 0 runs everywhere, until its program ends."""
        with suppress(_Ended):
            while True:
                function, arguments, options = self.shared(None)
                function(self, *arguments, **options)

    def everywhere(
        self,
        function: Callable[Concatenate[Group, Parameters], Result],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Run function(group, ...) on every rank, and return what it returns on this one.

        Rank 0 calls this while the others follow. All arguments are pickled.
        """
        with self.together():
            self.shared((function, arguments, options))
            return function(self, *arguments, **options)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do what every rank does; once that has failed nothing is done together any more
        (IoError)."""
        if not self._in_step:
            raise self._lost("an earlier failure")
        self._in_step = self.is_one
        yield
        self._in_step = True

    def shared(self, value: Any) -> Any:
        """Return rank 0's value on every rank, pickled; its end ends those that follow."""
        if self.is_one:
            return value
        if self.is_first:
            self._send((value,))
            return value
        message = self._receive()
        if message is None:
            raise _Ended
        return message[0]

    def columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return every rank's columns [T, sizes[rank]] side by side."""
        return self.several([Part(x, sizes, 1)])[0]

    def several(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Return the whole of each of some parts, all by one collective."""
        if self.is_one:
            return [part.own for part in parts]
        name = "several" if len(parts) > 1 else "columns" if parts[0].dim else "rows"
        return _whole(parts, self._gathered(name, _flat(parts)))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x, added in the order of ranks in float32: the same bits
        on all of them."""
        if self.is_one:
            return x
        first, *others = self._gathered("sum", x.contiguous()).unbind(0)
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Replace x by the sum of every rank's, in any order but with the same bits on all."""
        if not self.is_one:
            with self._collective("sum in place"):
                dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.add_up(torch.zeros(1))

    def rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return every rank's rows [counts[rank], d] one after the other."""
        return self.several([Part(x, counts, 0)])[0]

    def rows_to_first(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return every rank's rows one after the other on rank 0, the local ones on others."""
        if self.is_one:
            return x
        part = Part(x, counts, 0)
        flat = _flat([part])
        gathered = flat.new_empty(self.size, *flat.shape) if self.is_first else None
        with self._collective("rows to rank 0"):
            dist.gather(flat, None if gathered is None else list(gathered.unbind(0)))
        return x if gathered is None else _whole([part], gathered)[0]

    def smallest(self, number: int) -> int:
        """Return the smallest of the ranks' numbers."""
        if self.is_one:
            return number
        return int(self._gathered("smallest", torch.tensor([number])).min())

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each of some numbers over the ranks."""
        local = torch.tensor(numbers, dtype=torch.float64)
        parts = local[None] if self.is_one else self._gathered("totals", local)
        return [math.fsum(column) for column in parts.t().tolist()]

    def _gathered(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x [n] in the order of ranks [size, n]."""
        gathered = x.new_empty(self.size, *x.shape)
        with self._collective(name):
            if x.is_cpu:  # gloo passes an all_gather on from rank to rank, this in one step
                dist.all_to_all_single(gathered, x.expand_as(gathered).contiguous())
            else:
                dist.all_gather(list(gathered.unbind(0)), x)
        return gathered

    def _send(self, message: object) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        length = len(data).to_bytes(_LENGTH_BYTES, "little")
        buffer = _bytes_of(length + data)
        head = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        head[: len(buffer)] = buffer[:_MESSAGE_BYTES]
        with self._collective("message from rank 0"):
            dist.broadcast(head, src=0)
            if len(buffer) > _MESSAGE_BYTES:
                dist.broadcast(buffer[_MESSAGE_BYTES:].clone(), src=0)

    def _receive(self) -> Any:
        head = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
        with self._collective("message from rank 0"):
            dist.broadcast(head, src=0)
            size = int.from_bytes(bytes(head[:_LENGTH_BYTES].tolist()), "little") + _LENGTH_BYTES
            if size > _MESSAGE_BYTES:
                rest = torch.empty(size - _MESSAGE_BYTES, dtype=torch.uint8)
                dist.broadcast(rest, src=0)
                head = torch.cat([head, rest])
        return pickle.loads(head[_LENGTH_BYTES:size].numpy().tobytes())

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        """Count a collective; raise IoError where another rank has ended."""
        self.calls[name] += 1
        try:
            yield
        except RuntimeError as error:
            raise self._lost(str(error).partition("\n")[0][:200]) from error

    def _lost(self, found: str) -> IoError:
        return IoError(
            "Another process of this run has ended or cannot be reached",
            where=f"rank {self.rank} of {self.size}",
            found=found,
            todo="Its own message says why; start all of them again",
        )


LONE = Group()


def _flat(parts: Sequence[Part]) -> torch.Tensor:
    """Return the elements of the own parts one after the other [n], with zeros up to as many as the
    rank with the most has."""
    local = [part.own.reshape(-1) for part in parts]
    counts = [[math.prod(shape) for shape in part.shapes] for part in parts]
    missing = max(map(sum, zip(*counts, strict=True))) - sum(map(len, local))
    if missing:
        local.append(local[0].new_zeros(missing))
    return local[0] if len(local) == 1 else torch.cat(local)


def _whole(parts: Sequence[Part], gathered: torch.Tensor) -> list[torch.Tensor]:
    """Return the whole of each of some parts, given every rank's elements [size, n]."""
    start = [0] * len(gathered)
    whole = []
    for part in parts:
        pieces = []
        for rank, shape in enumerate(part.shapes):
            stop = start[rank] + math.prod(shape)
            pieces.append(gathered[rank, start[rank] : stop].view(shape))
            start[rank] = stop
        whole.append(torch.cat(pieces, dim=part.dim))
    return whole


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
