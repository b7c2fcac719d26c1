"""DeepSeek-V3.2: DeepSeek-V3 whose attentions have indexers, which pick the tokens to attend to.

Source: config.json and the index of the released checkpoint; DeepSeek-V3.2-Exp's inference code;
transformers' deepseek_v32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import ModulePatterns, Role, RotaryRows, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family
from mtp_checkpoints.families.modules import weight_name

_LINEARS = "self_attn.indexer.(wq_b|wk)$"
_UNQUANTIZED = "re:.*indexer.weights_proj$"


@dataclass(frozen=True, slots=True)
class IndexerModules:
    """Modules of an indexer: scores of cached keys, by head, and the weights of the heads."""

    query_up: str  # from the normed low rank of the attention's query
    key: str
    key_norm: str  # a layer norm, with a bias
    head_weights: str


@dataclass(frozen=True)
class DeepseekV32Family(DeepseekV3Family):
    """Tensors of one DeepSeek-V3.2 config."""

    # vLLM alone zeroes position 0.
    usual_contract = MtpContract(source="SGLang and vLLM; position 0 as in SGLang")

    usually_rotates_pairs: ClassVar[bool] = False  # where config.json does not say

    @cached_property
    def patterns(self) -> ModulePatterns:
        """Module names as engines' quantization configs refer to them."""
        others = super().patterns
        return replace(
            others,
            linears={**others.linears, Role.INDEXER: _LINEARS},
            other_matrices=(*others.other_matrices, _UNQUANTIZED),
        )

    @cached_property
    def index_topk(self) -> int:
        """Tokens that a query attends to: all of them in a context of at most so many."""
        return self._size("index_topk")

    def has_indexer(self, layer: int) -> bool:
        """True for a layer with an indexer of its own."""
        return True

    def indexer_of(self, layer: int) -> int:
        """Return the layer whose indexer chooses for a layer."""
        return next(index for index in range(layer, -1, -1) if self.has_indexer(index))

    @cached_property
    def rotates_pairs(self) -> bool:
        """True where an indexer rotates neighbouring elements, False for elements of two halves."""
        known = self.fields.without_nulls()
        return known.flag("indexer_rope_interleave", self.usually_rotates_pairs)

    def indexer_modules(self, layer: int) -> IndexerModules:
        """Modules of one layer's indexer."""
        prefix = f"{self.attention_prefix(layer)}.indexer"
        return IndexerModules(
            query_up=f"{prefix}.wq_b",
            key=f"{prefix}.wk",
            key_norm=f"{prefix}.k_norm",
            head_weights=f"{prefix}.weights_proj",
        )

    def attention_tensors(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer's attention, its indexer's last."""
        yield from super().attention_tensors(layer, mtp)
        if self.has_indexer(layer):
            yield from self.indexer_tensors(layer, mtp)

    def indexer_tensors(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer's indexer."""
        for spec in self._indexer_specs(layer, mtp):
            yield spec._replace(of_indexer=True)

    def _indexer_specs(self, layer: int, mtp: int | None) -> Iterator[TensorSpec]:
        if not self.sizes.query_rank:
            raise UnsupportedError(
                "config.json has an indexer without a low rank of queries, which it reads",
                expected="q_lora_rank",
                found=self.config.get("q_lora_rank"),
            )
        names, heads = self.indexer_modules(layer), self._size("index_n_heads")
        head = self._size("index_head_dim")
        rotary = RotaryRows(head, 0, self.sizes.rope)
        for module, shape in (
            (names.query_up, (heads * head, self.sizes.query_rank)),
            (names.key, (head, self.hidden)),
        ):
            yield self._linear(module, shape, Role.INDEXER, mtp)._replace(rotary=rotary)
        norm = self._norm(names.key_norm, head, mtp)
        yield norm
        yield norm._replace(name=f"{names.key_norm}.bias")
        yield TensorSpec(
            weight_name(names.head_weights),
            (heads, self.hidden),
            dtypes=tuple(dict.fromkeys((self.dtype, "F32"))),
            role=Role.INDEXER_HEADS,
            mtp_layer=mtp,
        )
