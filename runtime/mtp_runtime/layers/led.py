"""Parts of a split model that rank 0 calls and the other ranks take part in: embeddings of tokens,
and projections to the vocabulary. Each rank has the rows of some tokens."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from mtp_kernels.decoder import RowStep
from mtp_runtime.layers.embedding import EmbeddingTable
from mtp_runtime.layers.linear import Linear
from mtp_runtime.parallel.group import Group


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

    def product(self, x: torch.Tensor, *, packed: bool) -> torch.Tensor:
        """Return the own outputs."""
        return (self.step if packed and self.step is not None else self.linear)(x)


@dataclass(frozen=True)
class LedProjection:
    """A divided projection as the ranks' executions run it."""

    handle: Handle

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.handle.group.everywhere(_project, self.handle.number, x, packed=True)

    def best(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's largest output [T], the first of equal ones: of every
        rank no more is collected than its largest."""
        return self.handle.group.everywhere(_best, self.handle.number, x)


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

    def run_by(self, execution: Handle) -> LedProjection:
        """Return the projection as the ranks' executions run it."""
        self.handle.group.everywhere(_pack, execution.number, self.handle.number)
        return LedProjection(self.handle)


def _pack(group: Group, execution: int, number: int) -> None:
    part: _LinearPart = group.parts[number]
    if part.step is None:
        part.step = group.parts[execution].linear(part.linear)


def _project(group: Group, number: int, x: torch.Tensor, packed: bool = False) -> torch.Tensor:
    """Return the whole product on rank 0."""
    part: _LinearPart = group.parts[number]
    return group.columns_to_first(part.product(x, packed=packed), part.sizes)


def _best(group: Group, number: int, x: torch.Tensor) -> torch.Tensor:
    """Return the number of each row's largest output on rank 0."""
    part: _LinearPart = group.parts[number]
    values = part.product(x, packed=True).float()
    places = values.argmax(dim=1, keepdim=True)
    first = sum(part.sizes[: group.rank])
    # Numbers of outputs are exact in float32, which has 24 bits for them.
    own = torch.cat([values.gather(1, places), (places + first).float()], dim=1)
    found = group.columns_to_first(own, [2] * group.size).view(len(x), -1, 2)
    largest, numbers = found.unbind(-1)
    return numbers.gather(1, largest.argmax(dim=1, keepdim=True))[:, 0].long()
