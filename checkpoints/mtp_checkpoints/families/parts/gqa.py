"""Grouped-query attention, as GLM-4.5 stores it: biases and norms of queries and keys, and the
gates of what heads attend to, are optional.

Source: Ainslie et al., GQA (arXiv 2305.13245); config.json of the released GLM-4.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import (
    HeadRows,
    ModulePatterns,
    Role,
    RotaryRows,
    TensorMaker,
    TensorSpec,
)
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.rope import Rope
from mtp_kernels.sizes import GroupedSizes

_ROTARY_FACTOR = 0.5  # of every release; transformers' default too


@dataclass(frozen=True, slots=True)
class GqaModules:
    """Modules of grouped-query attention; the norms are None in a model without them."""

    query: str
    key: str
    value: str
    output: str
    query_norm: str | None
    key_norm: str | None


@dataclass(frozen=True, slots=True)
class Gqa:
    """Grouped-query attention over the stream's `hidden` elements."""

    hidden: int
    sizes: GroupedSizes
    rope: Rope

    patterns: ClassVar[ModulePatterns] = ModulePatterns(
        linears={Role.ATTENTION: "self_attn.*_proj.*"},
        fused={("q_proj", "k_proj", "v_proj"): ("qkv_proj",)},
    )

    @classmethod
    def of(cls, fields: Fields) -> Gqa:
        """Read a config.json (InvalidInputError for a missing or unusable size)."""
        hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        kv_heads = fields.whole("num_key_value_heads")
        if heads % kv_heads:
            raise InvalidInputError(
                "config.json's attention heads do not fall into groups",
                expected=f"num_attention_heads divisible by num_key_value_heads, {kv_heads}",
                found=heads,
            )
        head = fields.whole("head_dim", max(1, hidden // heads))
        sizes = GroupedSizes(
            heads,
            kv_heads,
            head=head,
            rope=_rotated(fields, head),
            has_bias=fields.flag("attention_bias", False),
            has_norms=fields.flag("use_qk_norm", False),
        )
        return cls(hidden, sizes, Rope.of(fields, sizes.rope))

    def without_positions(self) -> Gqa:
        """Return the attention without rotary positions."""
        return replace(self, sizes=self.sizes._replace(rope=0), rope=replace(self.rope, size=0))

    def modules(self, prefix: str) -> GqaModules:
        """Names of one layer's modules."""
        normed = self.sizes.has_norms
        return GqaModules(
            query=f"{prefix}.q_proj",
            key=f"{prefix}.k_proj",
            value=f"{prefix}.v_proj",
            output=f"{prefix}.o_proj",
            query_norm=f"{prefix}.q_norm" if normed else None,
            key_norm=f"{prefix}.k_norm" if normed else None,
        )

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield projections, biases and norms of one layer."""
        sizes, names, hidden = self.sizes, self.modules(prefix), self.hidden
        keys = sizes.kv_heads * sizes.head
        rotary = RotaryRows(sizes.head, 0, sizes.rope) if sizes.rope else None
        of_queries = rotary
        if sizes.is_gated:  # per head [query | gate]
            of_queries = RotaryRows(2 * sizes.head, 0, sizes.rope)
        for module, rows, turned in (
            (names.query, sizes.queries * sizes.head, of_queries),
            (names.key, keys, rotary),
            (names.value, keys, None),
        ):
            weight = make.matrix(module, (rows, hidden), Role.ATTENTION, rotary=turned)
            if sizes.is_gated and module == names.query:
                own = HeadRows(sizes.heads, (sizes.head, sizes.head), by_head=True)
                weight = weight._replace(head_rows=own)
            yield weight
            if sizes.has_bias:
                yield weight._replace(name=f"{module}.bias", shape=(rows,))
        yield make.matrix(names.output, (hidden, sizes.output), Role.ATTENTION)
        for norm in (names.query_norm, names.key_norm):
            if norm is not None:
                yield make.norm(norm, sizes.head)


def _rotated(fields: Fields, head: int) -> int:
    """Return the number of rotated elements of a head, which are pairs."""
    key, parameters = "partial_rotary_factor", fields.section("rope_parameters")
    holder = parameters if parameters.has(key) else fields.without_nulls()
    rotated = int(head * holder.number(key, _ROTARY_FACTOR, maximum=1.0))
    if rotated < 2 or rotated % 2:
        raise holder.unusable(key, f"a share of head_dim, {head}, that is even: pairs rotate")
    return rotated
