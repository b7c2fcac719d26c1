"""Layers of which every rank has a part: heads of an attention, inner values of an MLP, experts.

In mode gather a rank has some of the outputs of every matrix, and all inputs meet them in the order
of one process: every number has its bits. In mode reduce it has some inputs of the last matrix of a
half layer, and the ranks' sums are added in the order of ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.moe import Experts, Order, Router, sort_by_expert
from mtp_runtime.parallel.group import Group

GATHER, REDUCE = "gather", "reduce"
MODES = (GATHER, REDUCE)

RowStep = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Joining:
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


@dataclass(frozen=True)
class JoinedLinear(Linear):
    """A linear layer that takes the own part of its input and returns the whole output.

    The weight is the own part: in mode gather some outputs of all inputs, in mode reduce all
    outputs of the own inputs. inputs and outputs: numbers of every rank's.
    """

    joining: Joining = field(kw_only=True)
    inputs: tuple[int, ...] = field(kw_only=True)
    outputs: tuple[int, ...] = field(kw_only=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.joining.product(super().__call__, x, (self.inputs, self.outputs))


@dataclass(frozen=True)
class SplitMoe:
    """Mixture of experts whose routed ones are divided over the ranks, whole.

    experts: the own routed ones, then the shared ones, which take part of every row. parts: numbers
    of every rank's routed experts. Outputs are added in the order of experts in mode gather.
    """

    router: Router
    experts: Experts
    shared: int
    parts: tuple[range, ...]
    joining: Joining

    @property
    def own(self) -> range:
        """Numbers of the own routed experts."""
        return self.parts[self.joining.group.rank]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [T, d] to [T, d]."""
        picked, weights = self.router(x)
        order = sort_by_expert(picked)
        weights = weights.flatten()[order.pairs, None]
        rows = order.pairs // picked.shape[1]
        ends = ends_of_parts(order, self.parts)
        own = range(*[0, *ends][self.joining.group.rank :][:2])
        outputs = self._outputs(x, order, rows)
        if not self.joining.reduces:
            outputs, own = self.joining.group.rows(outputs, sizes_of(ends)), range(len(rows))
        total = torch.zeros_like(x, dtype=torch.float32)
        for start, stop in pairwise([0, *order.ends]):
            if own.start <= start and stop <= own.stop:
                made = outputs[start - own.start : stop - own.start]
                total.index_add_(0, rows[start:stop], made * weights[start:stop])
        for expert in self.experts.each(range(len(self.own), len(self.own) + self.shared)):
            total += expert(x)
        if self.joining.reduces:
            total = self.joining.group.sum(total)
        return total.to(x.dtype)

    def _outputs(self, x: torch.Tensor, order: Order, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the own experts for their pairs, in order of experts."""
        starts = [0, *order.ends]
        places = [at for at, expert in enumerate(order.experts) if expert in self.own]
        numbers = [order.experts[at] - self.own.start for at in places]
        made = [
            expert(x[rows[starts[at] : order.ends[at]]])
            for at, expert in zip(places, self.experts.each(numbers), strict=True)
        ]
        return torch.cat(made) if made else x.new_empty(0, x.shape[1])


def ends_of_parts(order: Order, parts: Sequence[range]) -> list[int]:
    """Return where the sorted pairs of every rank's experts end."""
    last = [bisect_left(order.experts, part.stop) for part in parts]
    return [order.ends[at - 1] if at else 0 for at in last]


def sizes_of(ends: Sequence[int]) -> list[int]:
    """Return the number of pairs of every rank."""
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
