"""Routed experts whose stored weights are multiplied in one call each, grouped by expert.

Nothing is read back from the device, so that a GPU's queue never runs dry between experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from mtp_export.schemes.formats import EncodedWeight
from mtp_kernels.stored_linear import StoredWeight, grouped_linear
from mtp_runtime.layers.linear import Linear, Stacked, Weight
from mtp_runtime.layers.moe import HeldExperts, Mlp

GROUPED_ROWS = 2048  # at a time: a pair of row and expert takes as much memory as a row


@dataclass(frozen=True)
class GroupedWeight:
    """Weights [out, in] of experts in one format, side by side in memory."""

    all: EncodedWeight

    @classmethod
    def of(cls, weights: Sequence[Weight]) -> GroupedWeight | None:
        """Copy weights together; None for those that are not stored alike."""
        found = [weight for weight in weights if isinstance(weight, EncodedWeight)]
        scales = [weight.scale for weight in found if weight.scale is not None]
        if len(scales) < len(weights) or len({weight.format for weight in found}) > 1:
            return None
        one = found[0]
        if isinstance(one.format.stored(one.codes, scales[0]), torch.Tensor):
            return None  # a format that the kernels do not know
        codes = torch.stack([weight.codes for weight in found])
        return cls(replace(one, codes=codes, scale=torch.stack(scales)))

    @property
    def stored(self) -> StoredWeight:
        """The weights [e, out, in] as the kernels take them."""
        assert self.all.scale is not None
        return self.all.format.stored(self.all.codes, self.all.scale)

    def one(self, number: int) -> EncodedWeight:
        """Return an expert's weight, which shares the memory."""
        assert self.all.scale is not None
        return replace(self.all, codes=self.all.codes[number], scale=self.all.scale[number])


@dataclass(frozen=True)
class GroupedExperts:
    """Routed experts, and shared ones behind them."""

    gate: GroupedWeight
    up: GroupedWeight
    down: GroupedWeight
    count: int
    shared: tuple[Mlp, ...]

    @classmethod
    def of(cls, experts: HeldExperts, routed: int) -> GroupedExperts | None:
        """Copy the routed experts together; None where they are not stored alike."""
        mlps = experts.held[:routed]
        pairs = [mlp.gate_up.weight for mlp in mlps]
        stacks = [pair.parts for pair in pairs if isinstance(pair, Stacked)]
        if len(stacks) < routed:
            return None
        gate, up = (GroupedWeight.of(column) for column in zip(*stacks, strict=True))
        down = GroupedWeight.of([mlp.down.weight for mlp in mlps])
        if gate is None or up is None or down is None:
            return None
        return cls(gate=gate, up=up, down=down, count=routed, shared=experts.held[routed:])

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
        if len(x) > GROUPED_ROWS:
            parts = (torch.split(tensor, GROUPED_ROWS) for tensor in (x, picked, weights))
            return torch.cat([self.routed(*part) for part in zip(*parts, strict=True)])
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        numbers = torch.arange(self.count, device=flat.device)
        ends = torch.searchsorted(flat[order], numbers, right=True, out_int32=True)
        rows = order // picked.shape[1]
        gate, up = (grouped_linear(x, rows, ends, part.stored) for part in (self.gate, self.up))
        outputs = grouped_linear(F.silu(gate).mul_(up), None, ends, self.down.stored)
        by_pick = torch.empty_like(outputs)
        by_pick[order] = outputs
        by_pick = by_pick.view(*picked.shape, -1)  # [T, k, d]
        return torch.sum(by_pick.float() * weights[:, :, None], dim=1)

    def _expert(self, number: int) -> Mlp:
        if number >= self.count:
            return self.shared[number - self.count]
        gate_up = Stacked((self.gate.one(number), self.up.one(number)))
        return Mlp(Linear(gate_up), Linear(self.down.one(number)))
