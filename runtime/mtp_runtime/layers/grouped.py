"""Routed experts, their weights stored or dense, multiplied in one call per matrix for all experts.

Nothing is read back from the device, so that a GPU's queue never runs dry between experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from mtp_checkpoints.formats import EncodedWeight
from mtp_kernels.stored_linear import StoredWeight
from mtp_runtime.layers.linear import Linear, Stacked, Weight, stack
from mtp_runtime.layers.moe import HeldExperts, Mlp
from mtp_runtime.layers.operators import grouped_product

GROUPED_ROWS = 2048  # at a time: a pair of row and expert takes as much memory as a row


@dataclass(frozen=True)
class GroupedWeight:
    """Weights [out, in] of experts in one format, side by side in memory."""

    all: EncodedWeight

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> GroupedWeight | None:
        """Copy weights together; None for those that are not stored alike, or are trained."""
        encoded = [weight for weight in weights if isinstance(weight, EncodedWeight)]
        kinds = {(weight.format, weight.codes.dtype, weight.scale is None) for weight in encoded}
        if len(encoded) < len(weights) or len(kinds) > 1:
            return None
        first = encoded[0]
        if first.codes.requires_grad or not _is_known(first):
            return None
        codes = torch.stack([weight.codes for weight in encoded])
        scales = [weight.scale for weight in encoded if weight.scale is not None]
        return cls(replace(first, codes=codes, scale=torch.stack(scales) if scales else None))

    @property
    def stored(self) -> StoredWeight:
        """The weights [e, out, in] as the kernels take them."""
        if self.all.scale is None:
            return self.all.codes
        return self.all.format.stored(self.all.codes, self.all.scale)

    def one(self, number: int) -> EncodedWeight:
        """Return an expert's weight, which shares the memory."""
        scale = None if self.all.scale is None else self.all.scale[number]
        return replace(self.all, codes=self.all.codes[number], scale=scale)


@dataclass(frozen=True)
class GroupedExperts:
    """Routed experts, and shared ones behind them. Gate and up are two weights, or one of both."""

    gate_up: tuple[GroupedWeight, ...]
    down: GroupedWeight
    count: int
    shared: tuple[Mlp, ...]

    @classmethod
    def of(cls, experts: HeldExperts, routed: int) -> GroupedExperts | None:
        """Copy the routed experts together; None where they have limits or another activation, or
        differ in form."""
        mlps = experts.held[:routed]
        if any(mlp.limit is not None or type(mlp) is not Mlp for mlp in mlps):
            return None
        stacks = [_parts(mlp.gate_up.weight) for mlp in mlps]
        if len(set(map(len, stacks))) > 1:
            return None
        gate_up = [GroupedWeight.of(column) for column in zip(*stacks, strict=True)]
        down = GroupedWeight.of([mlp.down.weight for mlp in mlps])
        grouped = tuple(weight for weight in gate_up if weight is not None)
        if len(grouped) < len(gate_up) or down is None:
            return None
        return cls(gate_up=grouped, down=down, count=routed, shared=experts.held[routed:])

    def __len__(self) -> int:
        return self.count + len(self.shared)

    def each(self, numbers: Iterable[int]) -> Iterator[Mlp]:
        """Yield the experts of these numbers; they share the memory."""
        return map(self._expert, numbers)

    def every(self) -> Iterator[Mlp]:
        """Yield all of them."""
        return self.each(range(len(self)))

    def routed(self, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the picked experts' outputs [T, d], float32.

        A row's outputs are added in the order of its picks: its bits depend on no other row.
        """
        if x.shape[0] > GROUPED_ROWS:
            parts = (torch.split(tensor, GROUPED_ROWS) for tensor in (x, picked, weights))
            return torch.cat([self.routed(*part) for part in zip(*parts, strict=True)])
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        numbers = torch.arange(self.count, device=flat.device)
        ends = torch.searchsorted(flat[order], numbers, right=True, out_int32=True)
        rows = order // picked.shape[1]
        made = [grouped_product(x, rows, ends, part.stored) for part in self.gate_up]
        gate, up = made if len(made) > 1 else made[0].chunk(2, dim=-1)
        outputs = grouped_product(F.silu(gate).mul_(up), None, ends, self.down.stored)
        by_pick = torch.empty_like(outputs)
        by_pick[order] = outputs
        by_pick = by_pick.view(*picked.shape, -1)  # [T, k, d]
        return torch.sum(by_pick.float() * weights[:, :, None], dim=1)

    def _expert(self, number: int) -> Mlp:
        if number >= self.count:
            return self.shared[number - self.count]
        gate_up = stack([part.one(number) for part in self.gate_up])
        return Mlp(Linear(gate_up), Linear(self.down.one(number)))


def _is_known(weight: EncodedWeight) -> bool:
    """Return True for a dense weight, and for a format that the kernels multiply with."""
    codes, scale = weight.codes, weight.scale
    return scale is None or not isinstance(weight.format.stored(codes, scale), torch.Tensor)


def _parts(weight: Weight) -> tuple[Weight, ...]:
    """Return the matrices that lie on top of each other in a weight."""
    return weight.parts if isinstance(weight, Stacked) else (weight,)
