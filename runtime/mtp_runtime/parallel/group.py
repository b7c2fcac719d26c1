"""Group of the processes, or ranks, that run one model together: everything that they exchange.

Rank 0 leads. What all are to do it tells the others as a function and its arguments; they run it
beside it, so that each meets the others in the same collectives in the same order.
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

import torch
import torch.distributed as dist

from mtp_export.errors import IoError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_MESSAGE_BYTES = 4096  # of what rank 0 tells: more takes a second broadcast
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
class _Sent:
    """Place of a tensor among the arguments that rank 0 tells; its content follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class Group:
    """Ranks that run one model together; of size 1 it does nothing.

    calls counts the collectives by name. parts are what the ranks hold of models, by numbers that
    are equal on all of them. together: this rank runs what all others do, as one by itself that
    plans its part of a model does from the first.
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
        if self.is_one:
            return x
        widest = max(sizes)
        parts = self._gathered("columns", _padded(x, widest, dim=1))
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return every rank's rows [counts[rank], d], one after the other."""
        if self.is_one:
            return x
        if not any(counts):
            return x
        parts = self._gathered("rows", _padded(x, max(counts), dim=0))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x, added in the order of ranks in float32: the same bits
        on all of them."""
        if self.is_one:
            return x
        first, *others = self._gathered("sum", x.contiguous())
        total = first.float()
        for other in others:
            total = total + other
        return total.to(x.dtype)

    def columns_to_first(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return every rank's columns side by side on rank 0, the own ones on others."""
        parts = self._collected("columns to rank 0", _padded(x, max(sizes), dim=1))
        if not parts:
            return x
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def rows_to_first(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return every rank's rows one after the other on rank 0, the own ones on others."""
        parts = self._collected("rows to rank 0", _padded(x, max(counts), dim=0))
        if not parts:
            return x
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each of some numbers over the ranks."""
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [own] if self.is_one else self._gathered("totals", own)
        return [math.fsum(column) for column in torch.stack(parts).t().tolist()]

    def _gathered(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._collective(name):
            dist.all_gather(parts, x)
        return parts

    def _collected(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor on rank 0, none on others."""
        if self.is_one:
            return [x]
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        with self._collective(name):
            dist.gather(x, parts or None)
        return parts

    def _tell(self, function: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        dropped, self._dropped = self._dropped, []
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        places = [
            _Sent(tuple(one.shape), one.dtype, one.device.type)
            if isinstance(one, torch.Tensor)
            else one
            for one in arguments
        ]
        self._send((function, places, options, dropped))
        for tensor in tensors:
            self._broadcast(tensor)

    def _told(self) -> tuple[Any, list[Any], dict[str, Any]] | None:
        message = self._receive()
        if message is None:
            return None
        function, places, options, dropped = message
        for number in dropped:
            self.parts.pop(number, None)
        arguments = [self._received(one) if isinstance(one, _Sent) else one for one in places]
        return function, arguments, options

    def _received(self, sent: _Sent) -> torch.Tensor:
        device = self.device(sent.device_type)
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=device)
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


def _padded(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Return x, contiguous, with zeros behind it up to a size."""
    missing = size - x.shape[dim]
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim=dim)


def _bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
