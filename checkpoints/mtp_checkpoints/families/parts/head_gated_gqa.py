"""Grouped-query attention with a gate of each head, a value that a matrix of its own gives; it may
be to the last tokens alone.

Source: transformers' step3p7; vLLM's step3p5; SGLang's, which never quantizes the gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mtp_checkpoints.families.base import ModulePatterns, Role, TensorMaker, TensorSpec, weight_name
from mtp_checkpoints.families.parts.gqa import Gqa


@dataclass(frozen=True, slots=True)
class HeadGatedGqa(Gqa):
    """Grouped-query attention with a gate of each head; window: tokens that one attends to, itself
    and those before it, None for all."""

    window: int | None

    patterns: ClassVar[ModulePatterns] = ModulePatterns(
        linears={Role.ATTENTION: "self_attn.(q|k|v|o|qkv)_proj.*"},
        other_matrices=("re:.*self_attn.g_proj$",),
        fused=Gqa.patterns.fused,
    )

    def gates(self, prefix: str) -> str:
        """Return the module of one layer's gates, [heads, hidden]."""
        return f"{prefix}.g_proj"

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield projections, biases, norms and gates of one layer."""
        yield from Gqa.tensors(self, prefix, make)
        gates = self.sizes.heads, self.hidden
        yield make.kept(weight_name(self.gates(prefix)), gates, Role.ATTENTION_GATES)
