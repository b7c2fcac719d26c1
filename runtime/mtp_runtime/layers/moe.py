"""Feed-forward layers: the gated MLP, and the mixture of experts that reads picked experts alone.

Source: DeepSeek-V3 technical report, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from mtp_runtime.layers.linear import Linear

MAX_PAIRS_IN_PYTHON = 512


def gated(both: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for [gate, up] side by side."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.gate_up(x)))


class Router(Protocol):
    """Picks experts for every row."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids [T, k] and their weights [T, k], float32, for x [T, d]."""


@dataclass(frozen=True)
class SigmoidRouter:
    """Picks experts by sigmoid scores; the bias counts for picking only.

    weight [d, e] and bias [e] are float32. A group's score is the sum of its two best experts.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    groups: int
    groups_per_token: int
    experts_per_token: int
    normalise: bool
    scale: torch.Tensor  # [1]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids [T, k] and their weights [T, k], float32, for x [T, d]."""
        scores = torch.mm(x.float(), self.weight).sigmoid_()  # [T, e]
        choice = scores + self.bias
        if self.groups > self.groups_per_token:
            choice = self._within_groups(choice)
        picked = choice.topk(self.experts_per_token, dim=-1)[1]
        weights = scores.gather(1, picked)
        if self.normalise:
            return picked, weights * (self.scale / weights.sum(dim=-1, keepdim=True))
        return picked, weights * self.scale

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.view(len(choice), self.groups, -1)  # [T, g, e/g]
        best_two = grouped.topk(2, dim=-1)[0].sum(dim=-1)
        picked = best_two.topk(self.groups_per_token, dim=-1)[1]
        left_out = torch.full_like(best_two, -torch.inf).scatter_(1, picked, 0.0)
        return torch.add(grouped, left_out[:, :, None]).flatten(1)


@dataclass(frozen=True)
class Moe:
    """Routed experts, and shared ones that every row goes through with weight 1.

    gate_up and down hold the routed experts, then the shared ones, all of one inner size. Experts
    that no row picked are not read.
    """

    router: Router
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    shared_ids: torch.Tensor  # [shared]
    shared_weights: torch.Tensor  # [shared], ones

    @property
    def routed_experts(self) -> int:
        """Number of experts that the router picks from."""
        return len(self.down) - len(self.shared_ids)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all experts of each row, shared ones last: ids and weights [T, k + shared]."""
        picked, weights = self.router(x)
        if not len(self.shared_ids):
            return picked, weights
        count = len(x)
        return (
            torch.cat([picked, self.shared_ids.expand(count, -1)], dim=1),
            torch.cat([weights, self.shared_weights.expand(count, -1)], dim=1),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [T, d] to [T, d]; rows are sorted by expert, one product per expert."""
        if len(x) == 1:
            picked, weights = self.route(x)
            return torch.mm(weights.to(x.dtype), self._one_row(x, picked[0].tolist()))
        picked, weights = self.router(x)
        order = sort_by_expert(picked, self.routed_experts)
        outer = self._experts(x[order.rows], order.ends)[order.places]
        outer = outer.view(len(x), picked.shape[1], -1)  # [T, k, d]
        total = torch.bmm(weights.to(x.dtype)[:, None], outer)[:, 0]
        for expert in range(self.routed_experts, len(self.down)):
            total += self.down[expert](gated(self.gate_up[expert](x)))
        return total

    def _one_row(self, x: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
        """Return the output of each of the experts for one row x [1, d]: [experts, d]."""
        inner = gated(torch.cat([self.gate_up[expert](x) for expert in experts]))
        return torch.cat(
            [self.down[e](row) for e, row in zip(experts, inner[:, None], strict=True)]
        )

    def _experts(self, rows: torch.Tensor, ends: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Take rows [n, d] in segments that end at `ends` through their experts."""
        count, hidden = rows.shape
        inner = rows.new_empty(count, self.gate_up[0].weight.shape[0])
        outer = rows.new_empty(count, hidden)
        _by_segment(self.gate_up, rows, ends, inner)
        _by_segment(self.down, gated(inner), ends, outer)
        return outer


def _by_segment(
    linears: Sequence[Linear],
    rows: torch.Tensor,
    ends: Sequence[tuple[int, int]],
    out: torch.Tensor,
) -> None:
    start = 0
    for expert, end in ends:
        torch.mm(rows[start:end], linears[expert].matrix(rows.dtype), out=out[start:end])
        start = end


@dataclass(frozen=True)
class Order:
    """(Row, expert) pairs sorted by expert.

    rows: the row of each sorted pair. ends: each picked expert, and the end of its pairs. places:
    the place of each pair of the original order.
    """

    rows: torch.Tensor
    ends: Sequence[tuple[int, int]]
    places: torch.Tensor


def sort_by_expert(picked: torch.Tensor, experts: int) -> Order:
    """Sort the pairs of picked [T, k]; few pairs are sorted faster without launching kernels."""
    count, device = picked.numel(), picked.device
    if count > MAX_PAIRS_IN_PYTHON:
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(count, device=device)
        counts = torch.bincount(flat, minlength=experts).tolist()
    else:
        pairs = picked.flatten().tolist()
        sorted_pairs = sorted(range(count), key=pairs.__getitem__)
        inverse = sorted(range(count), key=sorted_pairs.__getitem__)
        order = torch.tensor(sorted_pairs, device=device)
        places = torch.tensor(inverse, device=device)
        counts = [0] * experts
        for expert in pairs:
            counts[expert] += 1
    rows = order.div(picked.shape[1], rounding_mode="floor")
    ends, end = [], 0
    for expert, pairs_of_expert in enumerate(counts):
        if pairs_of_expert:
            end += pairs_of_expert
            ends.append((expert, end))
    return Order(rows, ends, places)
