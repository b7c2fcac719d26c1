"""Decoder layers with a norm before and after each part, and a factor on what leaves them.

Source: transformers' gemma4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtp_checkpoints.families.base import Role, TensorMaker, TensorSpec
from mtp_checkpoints.families.parts.feed_forward import GatedMlp
from mtp_checkpoints.families.spec import LayerSpec

NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True)
class PerLayerInput:
    """Part of a layer that adds what an embedding of its own has of every token, `size` elements:
    layer `index` takes the index-th of those that lie side by side."""

    size: int
    index: int

    gate = "per_layer_input_gate"
    projection = "per_layer_projection"
    norm = "post_per_layer_input_norm"


@dataclass(frozen=True)
class SandwichLayerSpec(LayerSpec):
    """Layer whose four norms surround attention, then the feed-forward. scale: the tensor [1] that
    its output is multiplied with. inputs: None in a model without embeddings per layer. beside: the
    MLP beside a mixture of experts, which takes the stream as it comes; None without one."""

    norms: tuple[str, ...] = NORMS
    scale: str = "layer_scalar"
    inputs: PerLayerInput | None = None
    beside: GatedMlp | None = None

    @property
    def mlp_prefix(self) -> str:
        """Prefix of the modules of the MLP beside a mixture."""
        return f"{self.prefix}.mlp"

    @property
    def mlp_norm(self) -> str:
        """Module of the norm behind that MLP."""
        return f"{self.prefix}.post_feedforward_layernorm_1"

    def norm(self, number: int) -> str:
        """Return the module of one of its norms."""
        return f"{self.prefix}.{self.norms[number]}"

    def tensors(self, hidden: int, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of a layer of a stream [T, hidden]."""
        yield from super().tensors(hidden, make)
        yield make.kept(f"{self.prefix}.{self.scale}", (1,), Role.NORM)
        if self.beside is not None:
            yield from self.beside.tensors(self.mlp_prefix, make)
            yield make.norm(self.mlp_norm, hidden)
        if self.inputs is not None:
            size, role = self.inputs.size, Role.PER_LAYER_INPUT
            yield make.matrix(f"{self.prefix}.{self.inputs.gate}", (size, hidden), role)
            yield make.matrix(f"{self.prefix}.{self.inputs.projection}", (hidden, size), role)
            yield make.norm(f"{self.prefix}.{self.inputs.norm}", hidden)
