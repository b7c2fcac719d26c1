"""Parts of a model that stay on disk: experts, heads and embeddings, read when they are used, a few
threads ahead of what computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from mtp_checkpoints.formats import EncodedWeight
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_runtime.layers.moe import Mlp, expert_by_expert

# Rows of a head that are read and multiplied at a time; whole fp8 blocks.
PANEL_ROWS = 1024
LOOKUP_ROWS = 64  # of an embedding that one reader looks up
READERS = 8  # reads at a time that a disk of today needs to be busy

Item = TypeVar("Item")
Read = TypeVar("Read")
Modules = TypeVar("Modules", bound=tuple[str, ...])  # of an expert; down is the last


def read_ahead(
    pool: Executor, read: Callable[[Item], Read], items: Iterable[Item], ahead: int = READERS
) -> Generator[Read]:
    """Yield read(item) of each item in order, while up to `ahead` of those after it are read.

    Nothing is kept that was yielded, and nothing more is read once the generator is closed.
    """
    waiting: deque[Future[Read]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


@dataclass(frozen=True)
class StoredExperts(Generic[Modules]):
    """Routed experts on disk, and shared ones in memory behind them.

    names: modules of each routed one, which load takes. kept: experts that were read stay in
    memory, for a layer that runs many times; None drops each when the next is asked for.
    """

    names: Sequence[Modules]
    load: Callable[[Modules], Mlp]
    shared: tuple[Mlp, ...]
    pool: Executor
    kept: dict[int, Mlp] | None = None

    def __len__(self) -> int:
        return len(self.names) + len(self.shared)

    def each(self, numbers: Iterable[int]) -> Iterator[Mlp]:
        """Yield the experts of these numbers, read ahead."""
        return read_ahead(self.pool, self._expert, numbers)

    def every(self) -> Iterator[Mlp]:
        """Yield all of them."""
        return self.each(range(len(self)))

    def routed(self, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the picked experts' outputs [T, d], float32."""
        return expert_by_expert(self, x, picked, weights)

    def _expert(self, number: int) -> Mlp:
        if number >= len(self.names):
            return self.shared[number - len(self.names)]
        if self.kept is None:
            return self.load(self.names[number])
        if number not in self.kept:
            self.kept[number] = self.load(self.names[number])
        return self.kept[number]


@dataclass(frozen=True)
class WeightOnDemand:
    """A weight on disk; every product reads it again, a panel of rows at a time."""

    stored: WeightOnDisk
    device: torch.device
    pool: Executor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.stored.weight.shape

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in] (ValueError for codes or scales that are damaged)."""
        return torch.cat([panel.dequantize(dtype) for panel in self._panels()])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T [T, out] (ValueError as dequantize)."""
        y = x.new_empty(len(x), self.shape[0])
        for start, panel in zip(self._starts, self._panels(), strict=True):
            y[:, start : start + PANEL_ROWS] = panel.product(x)
        return y

    @property
    def _starts(self) -> range:
        return range(0, self.shape[0], PANEL_ROWS)

    def _panels(self) -> Iterator[EncodedWeight]:
        return read_ahead(self.pool, self._panel, self._starts)

    def _panel(self, start: int) -> EncodedWeight:
        panel = self.stored.encoded(start, min(start + PANEL_ROWS, self.shape[0]))
        scale = None if panel.scale is None else panel.scale.to(self.device)
        codes, origin = panel.codes.to(self.device), self.stored.tensors[0]
        return replace(panel, codes=codes, scale=scale, origin=origin)


@dataclass(frozen=True, eq=False)
class EmbeddingOnDemand:
    """Embeddings on disk, of which rows are read when their tokens are looked up."""

    stored: WeightOnDisk
    dtype: torch.dtype
    device: torch.device
    pool: Executor

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        ids = tokens.tolist()
        distinct = sorted(set(ids))
        places = {token: place for place, token in enumerate(distinct)}
        parts = [distinct[at : at + LOOKUP_ROWS] for at in range(0, len(distinct), LOOKUP_ROWS)]
        rows = torch.cat([*read_ahead(self.pool, self._rows, parts)])
        order = torch.tensor([places[token] for token in ids], device=self.device)
        return rows.to(self.device, self.dtype)[order]

    def _rows(self, tokens: Sequence[int]) -> torch.Tensor:
        rows = (self.stored.encoded(at, at + 1) for at in tokens)
        return torch.cat([row.dequantize(self.dtype) for row in rows])
