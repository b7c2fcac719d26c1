"""Grouped-query attention without rotary positions, biases or norms, whose modules have a name of
their own in the layer.

Source: transformers' nemotron_h.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.parts.listed import Listed, grouped
from mtp_checkpoints.families.parts.rope import Rope
from mtp_kernels.sizes import GroupedSizes

_NO_POSITIONS = Rope(0, theta=10000.0)


@dataclass(frozen=True)
class PlainGqa(Listed):
    """Grouped-query attention without positions; gqa is what it computes."""

    gqa: Gqa

    @classmethod
    def of(cls, fields: Fields, name: str) -> PlainGqa:
        """Read a config.json (InvalidInputError for a missing or unusable size); name: of the part
        in its layer."""
        hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        kv_heads, head = fields.whole("num_key_value_heads"), fields.whole("head_dim")
        if heads % kv_heads:
            raise InvalidInputError(
                "config.json's attention heads do not fall into groups",
                expected=f"num_attention_heads divisible by num_key_value_heads, {kv_heads}",
                found=heads,
            )
        sizes = GroupedSizes(heads, kv_heads, head, rope=0, has_bias=False, has_norms=False)
        entries = grouped(hidden, heads, kv_heads, head)
        return cls("attention without positions", name, entries, Gqa(hidden, sizes, _NO_POSITIONS))
