"""Memory of the main model's routed experts, by headers alone: of all of them, or of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_kernels.cpu.memory import LINE_BYTES

_STATES = 5  # of a token: its stream, normed or not, and what a model keeps of it


@dataclass(frozen=True)
class MatrixMemory:
    """A matrix: its bytes in memory, whether it becomes dense, and its bytes on disk.

    stride_bytes: of an output in memory, with those that fill its last group of inputs.
    """

    outputs: int
    held_bytes: int
    stride_bytes: int
    is_dense: bool
    stored_bytes: int

    @property
    def panel_bytes(self) -> int:
        """Bytes in whole panels."""
        from mtp_kernels.cpu.panel_forms import PANEL  # which needs numba, as packing does

        return -(-self.outputs // PANEL) * PANEL * self.stride_bytes


@dataclass(frozen=True)
class ExpertMemory:
    """Routed experts of the main layers.

    number: of all of them; layer_picks: those that a row picks in one layer, row_picks in all of
    them. held_bytes: of all, dense_bytes of those that become dense; slot_bytes: of the largest one
    as it is packed; stored_bytes: of the largest one on disk. token_bytes: of what is computed of a
    token of a prompt, in the layer where it is most.
    """

    number: int
    layer_picks: int
    row_picks: int
    held_bytes: int
    dense_bytes: int
    slot_bytes: int
    stored_bytes: int
    token_bytes: int = 0

    def in_dtype(self, old: torch.dtype, new: torch.dtype) -> ExpertMemory:
        """Return the memory with dense matrices of another dtype; a slot is one form's."""
        dense = self.dense_bytes // old.itemsize * new.itemsize
        slot = self.slot_bytes // old.itemsize * new.itemsize if self.dense_bytes else None
        return replace(
            self,
            held_bytes=self.held_bytes - self.dense_bytes + dense,
            dense_bytes=dense,
            slot_bytes=slot or self.slot_bytes,
        )

    @classmethod
    def of(cls, spec: ModelSpec, matrices: Mapping[str, MatrixMemory]) -> ExpertMemory | None:
        """Add up the experts' matrices, given by their names; None for a model without any."""
        sparse = [
            (layer.feed_forward, layer.feed_forward_prefix)
            for layer in spec.layers
            if isinstance(layer.feed_forward, parts.Moe)
        ]
        experts = [
            [matrices[weight_name(module)] for module in expert]
            for part, prefix in sparse
            for expert in part.modules(prefix).experts
            if all(weight_name(module) in matrices for module in expert)
        ]
        if not experts:
            return None
        picks = [part.router.routing.experts_per_token for part, _ in sparse]
        every = list(chain.from_iterable(experts))
        return cls(
            number=len(experts),
            layer_picks=max(picks),
            row_picks=sum(picks),
            held_bytes=sum(matrix.held_bytes for matrix in every),
            dense_bytes=sum(matrix.held_bytes for matrix in every if matrix.is_dense),
            slot_bytes=max(map(_slot_bytes, experts)),
            stored_bytes=max(sum(matrix.stored_bytes for matrix in expert) for expert in experts),
            token_bytes=4 * max(_token_numbers(layer, spec.facts.hidden) for layer in spec.layers),
        )


def _token_numbers(layer: LayerSpec, hidden: int) -> int:
    """Return the numbers that a layer computes of a token, with its states around it."""
    attention, feed_forward = layer.attention, layer.feed_forward
    part = attention.mla if isinstance(attention, parts.SparseMla) else attention
    numbers = _STATES * hidden
    if isinstance(part, parts.Mla | parts.Gqa):
        sizes = part.sizes
        numbers += sizes.projected + sizes.heads * sizes.key + sizes.output
    if isinstance(part, parts.GatedDeltaNet):
        numbers += 2 * part.sizes.channels + 2 * part.sizes.output
    if isinstance(feed_forward, parts.Moe):
        experts = feed_forward.router.routing.experts_per_token + feed_forward.shared
        numbers += experts * feed_forward.expert.inner
    elif isinstance(feed_forward, parts.GatedMlp):
        numbers += feed_forward.inner
    return numbers


def _slot_bytes(expert: Sequence[MatrixMemory]) -> int:
    """Return the memory of an expert's two stacks: whole cache lines."""
    gate, up, down = (matrix.panel_bytes for matrix in expert)
    stacks = gate + up, down
    return sum(-(-size // LINE_BYTES) * LINE_BYTES for size in stacks)
