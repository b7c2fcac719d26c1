"""GLM-4.5, 4.6 and 4.7: grouped-query attention with biases, in the larger models norms of queries
and keys, and otherwise DeepSeek-V3's layers and MTP module.

Source: config.json of the released checkpoints; vLLM's glm4_moe_mtp; transformers' glm4_moe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families.base import Role, RotaryRows, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.moe_decoder import MoeDecoderFamily
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


@dataclass(frozen=True)
class Glm4MoeFamily(MoeDecoderFamily):
    """Tensors of one GLM-4.5 config."""

    fused = {("q_proj", "k_proj", "v_proj"): ("qkv_proj",)}
    # vLLM alone recycles before the norm and zeroes position 0.
    usual_contract = MtpContract(source="transformers, generate(use_mtp=True), and SGLang")

    @cached_property
    def sizes(self) -> GroupedSizes:
        """Sizes of attention (InvalidInputError, UnsupportedError for unusable ones)."""
        heads = self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads")
        if heads % kv_heads:
            raise InvalidInputError(
                "config.json's attention heads do not fall into groups",
                expected=f"num_attention_heads divisible by num_key_value_heads, {kv_heads}",
                found=heads,
            )
        head = self._size("head_dim", max(1, self.hidden // heads))
        return GroupedSizes(
            heads,
            kv_heads,
            head=head,
            rope=self._rotated(head),
            has_bias=self.fields.flag("attention_bias", False),
            has_norms=self.fields.flag("use_qk_norm", False),
        )

    def _rotated(self, head: int) -> int:
        """Return the number of rotated elements of a head, which are pairs."""
        key, parameters = "partial_rotary_factor", self.fields.section("rope_parameters")
        holder = parameters if parameters.has(key) else self.fields.without_nulls()
        rotated = int(head * holder.number(key, _ROTARY_FACTOR, maximum=1.0))
        if rotated < 2 or rotated % 2:
            raise holder.unusable(key, f"a share of head_dim, {head}, that is even: pairs rotate")
        return rotated

    def attention_modules(self, layer: int) -> GqaModules:
        """Modules of one layer's attention."""
        prefix = self.attention_prefix(layer)
        normed = self.sizes.has_norms
        return GqaModules(
            query=f"{prefix}.q_proj",
            key=f"{prefix}.k_proj",
            value=f"{prefix}.v_proj",
            output=f"{prefix}.o_proj",
            query_norm=f"{prefix}.q_norm" if normed else None,
            key_norm=f"{prefix}.k_norm" if normed else None,
        )

    def attention_tensors(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        """Yield projections, biases and norms of one layer's attention."""
        sizes, names, hidden = self.sizes, self.attention_modules(layer), self.hidden
        queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        rotary = RotaryRows(sizes.head, 0, sizes.rope)
        for module, rows, turned in (
            (names.query, queries, rotary),
            (names.key, keys, rotary),
            (names.value, keys, None),
        ):
            weight = self._linear(module, (rows, hidden), Role.ATTENTION, mtp)
            weight = weight._replace(rotary=turned)
            yield weight
            if sizes.has_bias:
                yield weight._replace(name=f"{module}.bias", shape=(rows,))
        yield self._linear(names.output, (hidden, queries), Role.ATTENTION, mtp)
        for norm in (names.query_norm, names.key_norm):
            if norm is not None:
                yield self._norm(norm, sizes.head, mtp)
