"""Latent attention to the tokens that an indexer picks, its own or that of a layer before it.

Source: config.json and the index of the released DeepSeek-V3.2; its inference code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import (
    ModulePatterns,
    Role,
    RotaryRows,
    TensorMaker,
    TensorSpec,
    weight_name,
)
from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.parts.rope import Rope


@dataclass(frozen=True, slots=True)
class IndexerModules:
    """Modules of an indexer: scores of cached keys, by head, and the weights of the heads."""

    query_up: str  # from the normed low rank of the attention's query
    key: str
    key_norm: str  # a layer norm, with a bias
    head_weights: str

    @classmethod
    def under(cls, prefix: str) -> IndexerModules:
        """Names of the indexer of an attention."""
        names = ("wq_b", "wk", "k_norm", "weights_proj")
        return cls(*(f"{prefix}.indexer.{name}" for name in names))


@dataclass(frozen=True, slots=True)
class Indexer:
    """Choice of topk tokens: all of them in a context of at most so many.

    rotates_pairs: it rotates neighbouring elements, else elements of two halves.
    """

    heads: int
    head: int
    topk: int
    rotates_pairs: bool

    @classmethod
    def of(cls, fields: Fields, *, usually_rotates_pairs: bool) -> Indexer:
        """Read a config.json, which may not say what is rotated."""
        known = fields.without_nulls()
        return cls(
            heads=fields.whole("index_n_heads"),
            head=fields.whole("index_head_dim"),
            topk=fields.whole("index_topk"),
            rotates_pairs=known.flag("indexer_rope_interleave", usually_rotates_pairs),
        )


@dataclass(frozen=True, slots=True)
class SparseMla:
    """Latent attention, and the indexer of the attention of a prefix, which chooses for it."""

    mla: Mla
    indexer: Indexer
    chosen_by: str

    patterns: ClassVar[ModulePatterns] = ModulePatterns(
        linears={**Mla.patterns.linears, Role.INDEXER: "self_attn.indexer.(wq_b|wk)$"},
        other_matrices=("re:.*indexer.weights_proj$",),
        fused=Mla.patterns.fused,
        absorbed=Mla.patterns.absorbed,
    )

    def __post_init__(self) -> None:
        if not self.mla.sizes.query_rank:
            raise UnsupportedError(
                "config.json has an indexer without a low rank of queries, which it reads",
                expected="q_lora_rank",
                found="none",
            )

    @property
    def rope(self) -> Rope:
        return self.mla.rope

    def chooses(self, prefix: str) -> bool:
        """True where the attention of a prefix has an indexer of its own."""
        return self.chosen_by == prefix

    def tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer, its indexer's last."""
        yield from self.mla.tensors(prefix, make)
        if self.chooses(prefix):
            yield from self.indexer_tensors(prefix, make)

    def indexer_tensors(self, prefix: str, make: TensorMaker) -> Iterator[TensorSpec]:
        """Yield the tensors of one layer's own indexer."""
        for spec in self._indexer_specs(IndexerModules.under(prefix), make):
            yield spec._replace(of_indexer=True)

    def _indexer_specs(self, names: IndexerModules, make: TensorMaker) -> Iterator[TensorSpec]:
        heads, head, mla = self.indexer.heads, self.indexer.head, self.mla
        rotary = RotaryRows(head, 0, mla.rope.size)
        queries = (heads * head, mla.sizes.query_rank)
        yield make.matrix(names.query_up, queries, Role.INDEXER, rotary=rotary)
        yield make.matrix(names.key, (head, mla.inputs), Role.INDEXER, rotary=rotary)
        norm = make.norm(names.key_norm, head)
        yield norm
        yield norm._replace(name=f"{names.key_norm}.bias")
        weights = weight_name(names.head_weights)
        yield make.kept(weights, (heads, mla.inputs), Role.INDEXER_HEADS)
