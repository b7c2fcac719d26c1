"""Layers of which every rank has a part: heads of an attention, inner values of an MLP, experts,
tokens of a vocabulary. All ranks call them with the same input, and get the same output.

In mode gather a rank has some of the outputs of every matrix, and all inputs meet them in the order
of one process: every number has its bits. In mode reduce it has some inputs of the last matrix of a
half layer, and the ranks' sums are added in the order of ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import torch

from mtp_kernels.decoder import Projection, RowStep
from mtp_runtime.layers.embedding import EmbeddingTable
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Experts, Mlp, Order, Router, sort_by_expert
from mtp_runtime.parallel.group import LONE, Group, Part

GATHER, REDUCE = "gather", "reduce"
MODES = (GATHER, REDUCE)


@dataclass(frozen=True)
class TensorParallel:
    """Group and mode by which the ranks' parts of a product become one."""

    group: Group
    mode: str = GATHER

    @property
    def reduces(self) -> bool:
        return self.mode == REDUCE

    def product(
        self, product: RowStep, x: torch.Tensor, sizes: tuple[Sequence[int], Sequence[int]]
    ) -> torch.Tensor:
        """Return a matrix's whole product [T, out] on every rank, given the own part of its input.

        product multiplies with the own part of the matrix; sizes are every rank's inputs and
        outputs.
        """
        if self.reduces:
            return self.group.sum(product(x))
        inputs, outputs = sizes
        return self.group.columns(product(self.group.columns(x, inputs)), outputs)


ALONE = TensorParallel(LONE)


@dataclass(frozen=True)
class RowParallelLinear(Linear):
    """A linear layer that takes the own part of its input and returns the whole output.

    The weight is the own part: in mode gather some outputs of all inputs, in mode reduce all
    outputs of the own inputs. inputs and outputs: numbers of every rank's.
    """

    parallel: TensorParallel = field(kw_only=True)
    inputs: tuple[int, ...] = field(kw_only=True)
    outputs: tuple[int, ...] = field(kw_only=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.product(super().__call__, x, (self.inputs, self.outputs))

    def own_input(self, x: torch.Tensor) -> Part:
        """Return the own part of the input [T, in], for of_whole in mode gather."""
        return Part(x, self.inputs, 1)

    def of_whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole output, given the whole input, in mode gather."""
        return self.parallel.group.columns(super().__call__(x), self.outputs)


@dataclass(frozen=True)
class ColumnParallelProjection:
    """A projection of which every rank has some outputs, and returns all, given whole inputs; of a
    vocabulary too. outputs: numbers of every rank's."""

    product: RowStep  # to the local outputs
    group: Group
    outputs: Sequence[int]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.columns(self.product(x), self.outputs)

    def best(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's largest output [T], the first of equal ones: of every
        rank no more is gathered than its largest."""
        values = self.product(x).float()
        places = values.argmax(dim=1, keepdim=True)
        first = sum(self.outputs[: self.group.rank])
        # Numbers of outputs are exact in float32, which has 24 bits for them.
        local = torch.cat([values.gather(1, places), (places + first).float()], dim=1)
        gathered = self.group.columns(local, [2] * self.group.size).view(len(x), -1, 2)
        largest, numbers = gathered.unbind(-1)
        return numbers.gather(1, largest.argmax(dim=1, keepdim=True))[:, 0].long()


@dataclass(frozen=True)
class ColumnParallelLinear(Linear):
    """A linear layer of which every rank has some outputs, and returns all, given whole inputs; the
    weight is the local part. outputs: numbers of every rank's."""

    group: Group = field(kw_only=True)
    outputs: tuple[int, ...] = field(kw_only=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_by(super().__call__)(x)

    def best(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_by(super().__call__).best(x)

    def run_by(self, product: RowStep) -> Projection:
        """Return the projection, given the local product as it is run."""
        return ColumnParallelProjection(product, self.group, self.outputs)


class VocabParallelEmbedding:
    """Embeddings of a vocabulary of which every rank has the rows [n, d] of some tokens."""

    def __init__(self, local: torch.Tensor, vocab: int, group: Group) -> None:
        self._table, self._group = EmbeddingTable(local, local.dtype), group
        self._parts = group.split.parts(vocab)

    @property
    def dtype(self) -> torch.dtype:
        return self._table.dtype

    @property
    def device(self) -> torch.device:
        return self._table.device

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, d] of tokens [T]."""
        rank, size = self._group.rank, self._group.size
        ends = torch.tensor([part.stop for part in self._parts], device=tokens.device)
        owners = torch.bucketize(tokens, ends, right=True)
        local = self._table(tokens[owners == rank] - self._parts[rank].start)
        rows = self._group.rows(local, torch.bincount(owners, minlength=size).tolist())
        embedded = torch.empty_like(rows)
        embedded[owners.argsort(stable=True)] = rows
        return embedded


@dataclass(frozen=True)
class ParallelMoe:
    """Mixture of experts whose routed ones are divided over the ranks, whole.

    experts: the own routed ones, then the shared ones, which take part of every row. parts: numbers
    of every rank's routed experts. Outputs are added in the order of experts in mode gather.
    """

    router: Router
    experts: Experts
    shared: int
    parts: tuple[range, ...]
    parallel: TensorParallel

    @property
    def own(self) -> range:
        """Numbers of the own routed experts."""
        return self.parts[self.parallel.group.rank]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [T, d] to [T, d]."""
        picked, weights = self.router(x)
        order = sort_by_expert(picked)
        pairs = _Pairs(order, order.pairs // picked.shape[1], weights.flatten()[order.pairs, None])
        total = self._reduced(x, pairs) if self.parallel.reduces else self._gathered(x, pairs)
        return total.to(x.dtype)

    def _gathered(self, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """Return the sum of all outputs, added in the order of one process."""
        sizes = sizes_of(ends_of_parts(pairs.order, self.parts))
        shared = [(expert, cast(RowParallelLinear, expert.down)) for expert in self._shared()]
        inner = [down.own_input(expert.inner(x)) for expert, down in shared]
        routed = Part(self._outputs(x, pairs), sizes, 0)
        outputs, *wholes = self.parallel.group.several([routed, *inner])
        total = pairs.added(torch.zeros_like(x, dtype=torch.float32), outputs)
        for (_, down), whole in zip(shared, wholes, strict=True):
            total += down.of_whole(whole)
        return total

    def _reduced(self, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """Return the sum of the ranks' sums."""
        first = [0, *ends_of_parts(pairs.order, self.parts)][self.parallel.group.rank]
        total = torch.zeros_like(x, dtype=torch.float32)
        total = pairs.added(total, self._outputs(x, pairs), first)
        for expert in self._shared():
            total += expert(x)
        return self.parallel.group.sum(total)

    def _shared(self) -> Iterator[Mlp]:
        return self.experts.each(range(len(self.own), len(self.own) + self.shared))

    def _outputs(self, x: torch.Tensor, pairs: _Pairs) -> torch.Tensor:
        """Return the outputs of the own experts for their pairs, in order of experts."""
        order, starts = pairs.order, [0, *pairs.order.ends]
        places = [at for at, expert in enumerate(order.experts) if expert in self.own]
        numbers = [order.experts[at] - self.own.start for at in places]
        made = [
            expert(x[pairs.rows[starts[at] : order.ends[at]]])
            for at, expert in zip(places, self.experts.each(numbers), strict=True)
        ]
        return torch.cat(made) if made else x.new_empty(0, x.shape[1])


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a row and an expert that it picked, sorted by expert; the row [P] and the weight
    [P, 1] of each."""

    order: Order
    rows: torch.Tensor
    weights: torch.Tensor

    def added(self, total: torch.Tensor, outputs: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Add the outputs of the pairs from the first on to their rows, expert by expert."""
        for start, stop in pairwise([0, *self.order.ends]):
            if first <= start and stop <= first + len(outputs):
                made = outputs[start - first : stop - first]
                total.index_add_(0, self.rows[start:stop], made * self.weights[start:stop])
        return total


def ends_of_parts(order: Order, parts: Sequence[range]) -> list[int]:
    """Return where the sorted pairs of every rank's experts end."""
    last = [bisect_left(order.experts, part.stop) for part in parts]
    return [order.ends[at - 1] if at else 0 for at in last]


def sizes_of(ends: Sequence[int]) -> list[int]:
    """Return the number of pairs of every rank."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
