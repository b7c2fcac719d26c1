"""Group of the processes, or ranks, that run or train one model together: everything that they
exchange.

Where rank 0 leads, it tells the others what all are to do, as a function and its arguments; they
run it beside it, so that each meets the others in the same collectives in the same order.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from mtp_checkpoints.errors import IoError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MESSAGE_BYTES = 16384  # of what rank 0 tells: more takes a second broadcast
_INSIDE_BYTES = 4096  # of a tensor that is told with the message; a larger one is a broadcast
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


@dataclass(frozen=True)
class _Sent:
    """Place of a tensor among the arguments that rank 0 tells; its content follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class _Inside:
    """A small tensor among the arguments that rank 0 tells, in main memory."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Inside:
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        return cls(data, tuple(tensor.shape), tensor.dtype)

    @property
    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.data).view(self.dtype).view(self.shape)


class Group:
    """Ranks that run or train one model together; of size 1 it does nothing.

    calls counts the collectives by name. parts are what the ranks hold of models, by numbers that
    are equal on all of them. together: this rank runs what all others do without being told, as
    those of a training do, and one by itself that plans its part of a model.
    """

    def __init__(
        self,
        split: Split | None = None,
        device: torch.device | None = None,
        *,
        together: bool = False,
    ) -> None:
        self.split = split or Split()
        self.calls: Counter[str] = Counter()
        self.parts: dict[int, Any] = {}
        self.in_step = True  # False once a failure ended what all ranks were doing
        self._device = device or torch.device("cpu")
        self._inside = together
        self._numbers = 0
        self._dropped: list[int] = []
        self._alone = RLock()

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
        """True for the rank that leads, writes files and shows progress."""
        return self.rank == 0

    @property
    def is_together(self) -> bool:
        """True while every rank runs the same function."""
        return self._inside

    def device(self, name: str) -> str:
        """Return the own device of a kind: of several accelerators of a machine, each has one."""
        return str(self._device) if name == self._device.type else name

    def keep(self, part: Any) -> int:
        """Keep a part of a model, and return its number."""
        self._numbers += 1
        self.parts[self._numbers] = part
        return self._numbers

    def drop(self, number: int) -> None:
        """Drop a part here, and on the other ranks when rank 0 next tells them anything."""
        if self.parts.pop(number, None) is not None:
            self._dropped.append(number)

    def everywhere(
        self,
        function: Callable[Concatenate[Group, Parameters], Result],
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Run function(group, ...) on every rank, and return what it returns on this one.

        Rank 0 alone calls this, from any thread; what a function calls itself runs on every rank
        already. Tensors among the arguments are broadcast, everything else is pickled.
        """
        if self.is_one:
            return function(self, *arguments, **options)
        with self._alone:
            if self._inside:
                return function(self, *arguments, **options)
            if not self.in_step:
                raise self._lost("an earlier failure")
            self._inside, self.in_step = True, False
            try:
                self._tell(function, arguments, options)
                result = function(self, *arguments, **options)
            finally:
                self._inside = False
            self.in_step = True
            return result

    @torch.inference_mode()
    def follow(self) -> None:
        """Do what rank 0 tells until it tells the end."""
        self._inside = True
        while (told := self._told()) is not None:
            function, arguments, options = told
            function(self, *arguments, **options)

    def end(self) -> None:
        """Let the other ranks end; rank 0 calls this, once, when it is in step with them."""
        if not self.is_one:
            self._send(None)

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

    def columns_to_first(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return every rank's columns side by side on rank 0, the own ones on others."""
        return self._collected("columns to rank 0", Part(x, sizes, 1))

    def rows_to_first(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return every rank's rows one after the other on rank 0, the own ones on others."""
        return self._collected("rows to rank 0", Part(x, counts, 0))

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each of some numbers over the ranks."""
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = own[None] if self.is_one else self._gathered("totals", own)
        return [math.fsum(column) for column in parts.t().tolist()]

    def _gathered(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return every rank's x [n] in the order of ranks [size, n]."""
        found = x.new_empty(self.size, *x.shape)
        with self._collective(name):
            if x.is_cpu:  # gloo passes an all_gather on from rank to rank, this in one step
                dist.all_to_all_single(found, x.expand_as(found).contiguous())
            else:
                dist.all_gather(list(found.unbind(0)), x)
        return found

    def _collected(self, name: str, part: Part) -> torch.Tensor:
        """Return the whole of a part on rank 0, the own part on others."""
        if self.is_one:
            return part.own
        x = _flat([part])
        found = x.new_empty(self.size, *x.shape) if self.is_first else None
        with self._collective(name):
            dist.gather(x, None if found is None else list(found.unbind(0)))
        return part.own if found is None else _whole([part], found)[0]

    def _tell(self, function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        dropped, self._dropped = self._dropped, []
        places = [_place_of(one) if isinstance(one, torch.Tensor) else one for one in arguments]
        self._send((function, places, options, dropped))
        for place, tensor in zip(places, arguments, strict=True):
            if isinstance(place, _Sent):
                self._broadcast(tensor)

    def _told(self) -> tuple[Any, list[Any], dict[str, Any]] | None:
        message = self._receive()
        if message is None:
            return None
        function, places, options, dropped = message
        for number in dropped:
            self.parts.pop(number, None)
        return function, [self._received(place) for place in places], options

    def _received(self, place: Any) -> Any:
        if isinstance(place, _Inside):
            return place.tensor
        if not isinstance(place, _Sent):
            return place
        device = self.device(place.device_type)
        tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
        self._broadcast(tensor)
        return tensor

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            with self._collective("tensor from rank 0"):
                dist.broadcast(tensor.contiguous(), src=0)

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
    own = [part.own.reshape(-1) for part in parts]
    counts = [[math.prod(shape) for shape in part.shapes] for part in parts]
    missing = max(map(sum, zip(*counts, strict=True))) - sum(map(len, own))
    if missing:
        own.append(own[0].new_zeros(missing))
    return own[0] if len(own) == 1 else torch.cat(own)


def _whole(parts: Sequence[Part], found: torch.Tensor) -> list[torch.Tensor]:
    """Return the whole of each of some parts, given every rank's elements [size, n]."""
    start = [0] * len(found)
    whole = []
    for part in parts:
        pieces = []
        for rank, shape in enumerate(part.shapes):
            stop = start[rank] + math.prod(shape)
            pieces.append(found[rank, start[rank] : stop].view(shape))
            start[rank] = stop
        whole.append(torch.cat(pieces, dim=part.dim))
    return whole


def _place_of(tensor: torch.Tensor) -> _Sent | _Inside:
    if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _INSIDE_BYTES:
        return _Inside.of(tensor)
    return _Sent(tuple(tensor.shape), tensor.dtype, tensor.device.type)


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
