"""Parts of a split model that rank 0 calls and the other ranks take part in: embeddings of tokens,
and projections to the vocabulary. Each rank has the rows of some tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mtp_runtime.layers.embedding import EmbeddingTable
from mtp_runtime.layers.linear import Linear
from mtp_runtime.parallel.group import Group

RowStep = Callable[[torch.Tensor], torch.Tensor]


class Handle:
    """A part that every rank keeps under one number: rank 0's hold on it. When that is gone, so is
    the part everywhere; on other ranks nothing else stays of what the handle was made for."""

    def __init__(self, group: Group, part: object) -> None:
        assert group.is_together, "every rank makes its part"
        self.group, self.number = group, group.keep(part)
        if group.rank == 0:
            weakref.finalize(self, group.drop, self.number)


@dataclass(frozen=True)
class _TablePart:
    table: EmbeddingTable
    parts: list[range]  # tokens of every rank


class LedEmbedding:
    """Embeddings of a vocabulary whose rows are divided over the ranks."""

    def __init__(self, group: Group, own: torch.Tensor, vocab: int) -> None:
        self._table = EmbeddingTable(own)
        self._handle = Handle(group, _TablePart(self._table, group.split.parts(vocab)))

    @property
    def dtype(self) -> torch.dtype:
        return self._table.dtype

    @property
    def device(self) -> torch.device:
        return self._table.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        return self._handle.group.everywhere(_look_up, self._handle.number, tokens)


def _look_up(group: Group, number: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the embeddings on rank 0, in the order of tokens."""
    part: _TablePart = group.parts[number]
    ends = torch.tensor([one.stop for one in part.parts], device=tokens.device)
    owners = torch.bucketize(tokens, ends, right=True)
    own = tokens[owners == group.rank] - part.parts[group.rank].start
    counts = torch.bincount(owners, minlength=group.size).tolist()
    rows = group.rows_to_first(part.table(own), counts)
    if group.rank:
        return rows
    found = torch.empty_like(rows)
    found[owners.argsort(stable=True)] = rows
    return found


@dataclass
class _LinearPart:
    linear: Linear
    sizes: list[int]  # outputs of every rank
    step: RowStep | None = None  # the linear, as an execution runs it


@dataclass(frozen=True)
class LedLinear(Linear):
    """A projection whose outputs are divided over the ranks; the weight is the own part."""

    handle: Handle = field(kw_only=True)

    @classmethod
    def of(cls, part: Linear, group: Group, outputs: int) -> LedLinear:
        """Divide a linear of some outputs, given the own part of it."""
        handle = Handle(group, _LinearPart(part, group.split.sizes(outputs)))
        return cls(part.weight, part.transposed, handle=handle)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.handle.group.everywhere(_project, self.handle.number, x)

    def run_by(self, execution: Handle) -> RowStep:
        """Return the projection as the ranks' executions run it."""
        group, number = self.handle.group, self.handle.number
        group.everywhere(_pack, execution.number, number)
        return lambda x: group.everywhere(_project, self.handle.number, x, packed=True)


def _pack(group: Group, execution: int, number: int) -> None:
    part: _LinearPart = group.parts[number]
    if part.step is None:
        part.step = group.parts[execution].linear(part.linear)


def _project(group: Group, number: int, x: torch.Tensor, packed: bool = False) -> torch.Tensor:
    """Return the whole product on rank 0."""
    part: _LinearPart = group.parts[number]
    step = part.step if packed and part.step is not None else part.linear
    return group.columns_to_first(step(x), part.sizes)
