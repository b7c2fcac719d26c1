"""Loads parts of layers out of a source, by names; of several ranks each loads its own share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.facts import ModelFacts
from mtp_checkpoints.families.parts.feed_forward import MlpModules
from mtp_checkpoints.families.parts.ungated import UngatedModules
from mtp_runtime.layers.linear import Linear, Weight, stack
from mtp_runtime.layers.moe import Mlp, UngatedMlp
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.rope import Rope
from mtp_runtime.loading.weight_source import WeightSource

Made = TypeVar("Made")
# Modules under a prefix that kernels pack as one matrix, where they have one form.
Stacks = Iterable[tuple[str, ...]]


@dataclass(frozen=True)
class LayerLoader:
    """Loads layers out of a source, by names; each method loads what it returns.

    max_positions: tokens of the longest context.
    """

    source: WeightSource
    facts: ModelFacts
    max_positions: int

    def refuse_ranks(self, prefix: str, part: str) -> None:
        """Raise UnsupportedError where several ranks would divide a part that none divides."""
        if self.source.split.size > 1:
            raise UnsupportedError(
                f"Ranks do not divide {part}",
                where=prefix,
                expected="one process",
                found=f"{self.source.split.size} ranks",
            )

    def norm(self, module: str) -> RmsNorm:
        """Load an RMS norm."""
        weight = self.source.tensor(weight_name(module))
        return RmsNorm.build(weight, self.facts.norm_eps, self.facts.norm_offset)

    def rope(self, rope: parts.Rope) -> Rope:
        """Return rotations, which all layers that rotate alike share."""
        return self.once(rope, lambda: Rope.build(rope, self.source.device))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what was made for a key, made now if it was not yet: layers may share it."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def stacked(self, *modules: str, rows: range | None = None) -> Linear:
        """Load linears of the same input as one, or the same rows of each."""
        return self.joined(*(self.source.weight(module, rows) for module in modules))

    def joined(self, *weights: Weight) -> Linear:
        """Join loaded weights of the same input into one linear."""
        return Linear.build(stack(weights), self.source.dtype, self.source.keep_dense)

    def mlp(self, names: MlpModules, limit: float | None = None) -> Mlp:
        """Load a whole gated MLP."""
        return Mlp(self.stacked(names.gate, names.up), self.source.linear(names.down), limit)

    def ungated_mlp(self, names: UngatedModules) -> UngatedMlp:
        """Load an MLP without a gate."""
        return UngatedMlp(self.source.linear(names.up), self.source.linear(names.down))

    def split_mlp(self, names: MlpModules, inner: range, *, joins: bool = True) -> Mlp:
        """Load some inner values of a gated MLP, of which every rank has a part.

        joins False: its output is the local summand of the whole.
        """
        shares = [
            range(inner.start + share.start, inner.start + share.stop)
            for share in self.source.split.nonempty_parts(len(inner), "inner values")
        ]
        local = shares[self.source.split.rank]
        gate_up = self.stacked(names.gate, names.up, rows=local)
        if not joins:
            return Mlp(gate_up, self.source.linear(names.down, columns=local))
        return Mlp(gate_up, self.source.row_parallel(names.down, shares))
