"""Feed-forward layers: the gated MLP, and the mixture of experts, which asks for picked ones alone.

Source: DeepSeek-V3 technical report, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from mtp_kernels.sizes import Routing
from mtp_runtime.layers.linear import Linear

# Rows that an MLP takes at a time: inner values of more would outweigh its weights.
MLP_ROWS = 2048


def gated(both: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """Return silu(gate) * up for [gate, up] side by side; limit: what the first factor is at most,
    and the second on either side of 0."""
    gate, up = both.chunk(2, dim=-1)
    if limit is None:
        return F.silu(gate).mul_(up)
    return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, limit as in `gated`."""

    gate_up: Linear
    down: Linear
    limit: float | None = None

    is_gated: ClassVar[bool] = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MLP_ROWS:
            return torch.cat([self(rows) for rows in torch.split(x, MLP_ROWS)])
        return self.down(self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner values [T, i] of rows x [T, d]."""
        return gated(self.gate_up(x), self.limit)


@dataclass(frozen=True)
class UngatedMlp(Mlp):
    """down(relu(up(x))^2); gate_up is up alone, and nothing bounds its values.

    Source: transformers' nemotron_h.
    """

    is_gated: ClassVar[bool] = False

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner values [T, i] of rows x [T, d]."""
        return F.relu(self.gate_up(x)).square()


@dataclass(frozen=True)
class GeluMlp(Mlp):
    """down(gelu(gate(x)) * up(x)), with the approximation by tanh."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner values [T, i] of rows x [T, d]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


class Experts(Protocol):
    """Experts of one inner size, by number, wherever they are kept."""

    def __len__(self) -> int: ...

    def each(self, numbers: Iterable[int]) -> Iterator[Mlp]:
        """Yield the experts of these numbers, in their order; nobody else need be read."""

    def every(self) -> Iterator[Mlp]:
        """Yield all of them."""

    def routed(self, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the picked experts' outputs [T, d], float32."""


@dataclass(frozen=True)
class HeldExperts:
    """Experts in memory."""

    held: tuple[Mlp, ...]

    def __len__(self) -> int:
        return len(self.held)

    def each(self, numbers: Iterable[int]) -> Iterator[Mlp]:
        """Yield the experts of these numbers."""
        return (self.held[number] for number in numbers)

    def every(self) -> Iterator[Mlp]:
        """Yield all of them."""
        return iter(self.held)

    def routed(self, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the picked experts' outputs [T, d], float32."""
        return expert_by_expert(self, x, picked, weights)


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
    routing: Routing
    scale: torch.Tensor  # [1], that of routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids [T, k] and their weights [T, k], float32, for x [T, d]."""
        scores = torch.mm(x.float(), self.weight).sigmoid_()  # [T, e]
        choice = scores + self.bias
        if self.routing.groups > self.routing.groups_per_token:
            choice = self._within_groups(choice)
        picked = choice.topk(self.routing.experts_per_token, dim=-1)[1]
        weights = scores.gather(1, picked)
        if self.routing.normalises:
            return picked, weights * (self.scale / weights.sum(dim=-1, keepdim=True))
        return picked, weights * self.scale

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.view(choice.shape[0], self.routing.groups, -1)  # [T, g, e/g]
        best_two = grouped.topk(2, dim=-1)[0].sum(dim=-1)
        picked = best_two.topk(self.routing.groups_per_token, dim=-1)[1]
        left_out = torch.full_like(best_two, -torch.inf).scatter_(1, picked, 0.0)
        return torch.add(grouped, left_out[:, :, None]).flatten(1)


@dataclass(frozen=True)
class SoftmaxRouter:
    """Picks experts by their shares of the softmax over all; weight [d, e] is float32.

    Source: transformers' qwen3_next.
    """

    weight: torch.Tensor
    routing: Routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return expert ids [T, k] and their weights [T, k], float32, for x [T, d]."""
        shares = torch.mm(x.float(), self.weight).softmax(dim=-1)  # [T, e]
        weights, picked = shares.topk(self.routing.experts_per_token, dim=-1)
        if self.routing.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return picked, weights * self.routing.scale


@dataclass(frozen=True)
class Moe:
    """Routed experts, and shared ones that every row goes through with weight 1.

    experts holds the routed ones, then `shared` shared ones. Experts that no row picked are not
    asked for. shared_gate [d], float32: the sigmoid of its product with a row is what the shared
    ones are weighted with; None: 1.
    """

    router: Router
    experts: Experts
    shared: int
    shared_gate: torch.Tensor | None = None

    @property
    def routed_experts(self) -> int:
        """Number of experts that the router picks from."""
        return len(self.experts) - self.shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [T, d] to [T, d]."""
        picked, weights = self.router(x)
        total = self.experts.routed(x, picked, weights)
        gate = self.shared_gate
        share = None if gate is None else torch.mv(x.float(), gate).sigmoid()[:, None]  # [T, 1]
        for expert in self.experts.each(range(self.routed_experts, len(self.experts))):
            total += expert(x) if share is None else expert(x) * share
        return total.to(x.dtype)


@dataclass(frozen=True)
class LatentMoe:
    """Routed experts that take a projection of a row, into(x) [T, l], and whose weighted sum [T, l]
    out projects back; the shared experts behind them take the row, with weight 1.

    Source: transformers' nemotron_h.
    """

    router: Router
    experts: Experts
    shared: int
    into: Linear
    out: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [T, d] to [T, d]."""
        picked, weights = self.router(x)
        total = self.out(self.experts.routed(self.into(x), picked, weights).to(x.dtype))
        count = len(self.experts)
        for expert in self.experts.each(range(count - self.shared, count)):
            total = total + expert(x)
        return total


def expert_by_expert(
    experts: Experts, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums of outputs [T, d], float32: each expert takes all of its rows at
    once."""
    order = sort_by_expert(picked)
    weights = weights.flatten()[order.pairs, None]
    total = torch.zeros_like(x, dtype=torch.float32)
    start = 0
    for expert, end in zip(experts.each(order.experts), order.ends, strict=True):
        rows = order.pairs[start:end] // picked.shape[1]
        total.index_add_(0, rows, expert(x[rows]) * weights[start:end])
        start = end
    return total


@dataclass(frozen=True)
class Order:
    """(Row, expert) pairs sorted by expert.

    pairs: number of each sorted pair, row * k + place among the row's picks. experts: those that
    were picked, ascending. ends: end of the pairs of each.
    """

    pairs: torch.Tensor
    experts: Sequence[int]
    ends: Sequence[int]


def sort_by_expert(picked: torch.Tensor) -> Order:
    """Sort the pairs of picked [T, k]."""
    flat = picked.flatten()
    counts = torch.bincount(flat)
    experts = counts.nonzero()[:, 0]
    ends = counts[experts].cumsum(0)
    return Order(flat.argsort(stable=True), experts=experts.tolist(), ends=ends.tolist())
