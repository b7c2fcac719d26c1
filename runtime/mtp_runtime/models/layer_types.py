"""Layers by the parts of a model's description, and what loads them; of several ranks each loads
its own share. A new part is one line of LAYERS, with the function that loads it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import TensorMaker, weight_name
from mtp_checkpoints.families.parts.feed_forward import BIASED, MlpModules, MoeModules
from mtp_checkpoints.families.parts.sparse_mla import IndexerModules
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec
from mtp_kernels.sizes import LatentSizes
from mtp_runtime.config import refuse_other_values
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.gqa import Gqa
from mtp_runtime.layers.linear import Linear, UnreadWeight, Weight, dense, stack
from mtp_runtime.layers.mla import Halves, Mla, StoredHalves
from mtp_runtime.layers.moe import Mlp, Moe, SigmoidRouter
from mtp_runtime.layers.norm import LayerNorm, RmsNorm
from mtp_runtime.layers.rope import Rope, rotate_first_pairs, rotate_halves, softmax_scale
from mtp_runtime.layers.sparse_mla import Indexer, SparseMla
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.loading.weight_source import WeightSource

_KEY_NORM_EPS = 1e-6  # of an indexer, whatever rms_norm_eps is
Made = TypeVar("Made")


@dataclass(frozen=True)
class LayerLoader:
    """Loads layers out of a source, by names; each method loads what it returns.

    max_positions: tokens of the longest context.
    """

    source: WeightSource
    norm_eps: float
    max_positions: int

    def norm(self, module: str) -> RmsNorm:
        """Load an RMS norm."""
        return RmsNorm.build(self.source.tensor(weight_name(module)), self.norm_eps)

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

    def mlp(self, names: MlpModules) -> Mlp:
        """Load a whole gated MLP."""
        return Mlp(self.stacked(names.gate, names.up), self.source.linear(names.down))

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


def check_rope(part: parts.Mla | parts.SparseMla | parts.Gqa) -> None:
    """Raise UnsupportedError for a rotary scaling other than YaRN's, or a YaRN that leaves the
    original positions open."""
    rope = part.rope
    stretched = rope.yarn is not None and rope.yarn.original_positions is not None
    if rope.scaling != parts.PLAIN and not stretched:
        raise UnsupportedError(
            "config.json asks for a rotary scaling that the runtime does not have",
            expected="default, or yarn with original_max_position_embeddings",
            found=rope.scaling,
        )


def load_mla(loader: LayerLoader, part: parts.Mla, prefix: str) -> Mla:
    """Load latent attention; the halves of kv_b_proj, which are absorbed, become dense but where
    kernels pack them."""
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    heads = source.split.nonempty_parts(sizes.heads, "heads")
    local = heads[source.split.rank]
    query = _rows(local, sizes.nope + sizes.rope)
    down = names.query_down
    return Mla(
        down=loader.joined(
            source.weight(down) if down else source.weight(names.query_up, query),
            source.weight(names.latent_down),
        ),
        query_norm=None if names.query_norm is None else loader.norm(names.query_norm),
        query_up=source.linear(names.query_up, query) if down else None,
        latent_norm=loader.norm(names.latent_norm),
        up=_halves(source, names.latent_up, local, sizes),
        output=source.row_parallel(names.output, [_rows(p, sizes.value) for p in heads]),
        rope=loader.rope(part.rope),
        sizes=sizes._replace(heads=len(local)),
        scale=softmax_scale(part.rope, sizes.nope + sizes.rope),
    )


def _halves(
    source: WeightSource, module: str, heads: range, sizes: LatentSizes
) -> Halves | StoredHalves:
    """Load the halves of kv_b_proj of some heads."""
    weight = source.weight(module, _rows(heads, sizes.nope + sizes.value))
    if isinstance(weight, UnreadWeight):
        return StoredHalves(Linear(weight), len(heads), sizes.nope)
    return Halves.of(dense(weight, source.dtype), len(heads), sizes.nope)


def load_sparse_mla(loader: LayerLoader, part: parts.SparseMla, prefix: str) -> Attention:
    """Load sparse attention; where no context has more tokens than a query attends to, that is
    dense attention, and the indexer is left out."""
    mla, chooses = load_mla(loader, part.mla, prefix), part.chooses(prefix)
    if loader.max_positions > part.indexer.topk:
        indexer = loader.once(part.chosen_by, lambda: _indexer(loader, part))
        return SparseMla(mla, indexer, owns_indexer=chooses)
    if chooses:
        for spec in part.indexer_tensors(prefix, TensorMaker(DType.F32)):  # names alone
            loader.source.leave_out(spec.name)
    return mla


def check_chooses(layer: LayerSpec, max_positions: int) -> None:
    """Raise UnsupportedError for a layer that attends to what an indexer of another one chooses."""
    part = layer.attention
    if not isinstance(part, parts.SparseMla) or part.chooses(layer.attention_prefix):
        return
    if max_positions > part.indexer.topk:
        raise UnsupportedError(
            "Heads like the target's last layer have no indexer where that layer has none",
            where=layer.prefix,
            expected=f"contexts of at most {part.indexer.topk} tokens",
            found=f"{max_positions}, in which the layer attends to tokens that {part.chosen_by}"
            " chooses",
            todo="Leave max_model_len out, or use another draft",
        )


def dense_context(part: parts.SparseMla) -> tuple[int, str]:
    """Return the tokens of the longest context whose attention is dense, and what bounds them."""
    return part.indexer.topk, (
        "index_topk of config.json: with max_model_len torch computes the sparse attention of"
        " longer contexts"
    )


def _indexer(loader: LayerLoader, part: parts.SparseMla) -> Indexer:
    """Load the indexer that chooses for a layer: its own, or that of the last one before."""
    source, names = loader.source, IndexerModules.under(part.chosen_by)
    weight, bias = (
        source.tensor(f"{names.key_norm}.{last}").float() for last in ("weight", "bias")
    )
    return Indexer(
        query_up=source.linear(names.query_up),
        key=source.linear(names.key),
        key_norm=LayerNorm(weight, bias, _KEY_NORM_EPS),
        head_weights=source.raw(weight_name(names.head_weights)).float(),
        rope=loader.rope(part.rope),
        rotate=rotate_first_pairs if part.indexer.rotates_pairs else rotate_halves,
        topk=part.indexer.topk,
    )


def load_gqa(loader: LayerLoader, part: parts.Gqa, prefix: str) -> Gqa:
    """Load grouped-query attention, each key head with the queries that share it."""
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    groups = source.split.nonempty_parts(sizes.kv_heads, "key heads")
    local, each = groups[source.split.rank], sizes.heads // sizes.kv_heads
    rows = {
        names.query: _rows(local, each * sizes.head),
        names.key: _rows(local, sizes.head),
        names.value: _rows(local, sizes.head),
    }
    bias = None
    if sizes.has_bias:
        bias = torch.cat(
            [
                source.tensor(f"{module}.bias")[share.start : share.stop]
                for module, share in rows.items()
            ]
        )
    return Gqa(
        qkv=loader.joined(*(source.weight(module, share) for module, share in rows.items())),
        bias=bias,
        query_norm=None if names.query_norm is None else loader.norm(names.query_norm),
        key_norm=None if names.key_norm is None else loader.norm(names.key_norm),
        output=source.row_parallel(
            names.output, [_rows(share, each * sizes.head) for share in groups]
        ),
        rope=loader.rope(part.rope),
        sizes=sizes._replace(heads=each * len(local), kv_heads=len(local)),
    )


def _rows(heads: range, size: int) -> range:
    """Return the rows of some heads of a size each."""
    return range(heads.start * size, heads.stop * size)


def check_mlp(part: parts.GatedMlp) -> None:
    """Raise UnsupportedError for an activation that is not computed."""
    refuse_other_values({"hidden_act": part.activation}, {"hidden_act": "silu"})


def check_moe(part: parts.Moe) -> None:
    """Raise UnsupportedError for a router or an activation that is not computed."""
    check_mlp(part.expert)
    described = {"scoring_func": part.router.scoring, "topk_method": part.router.method}
    refuse_other_values(described, {"scoring_func": "sigmoid", "topk_method": BIASED})


def load_mlp(loader: LayerLoader, part: parts.GatedMlp, prefix: str) -> Mlp:
    """Load a dense layer's MLP."""
    return loader.split_mlp(MlpModules.under(prefix), range(part.inner))


def load_moe(loader: LayerLoader, part: parts.Moe, prefix: str) -> Moe | ParallelMoe:
    """Load a mixture of experts, routed ones first; of those every rank has some, whole."""
    source, names = loader.source, part.modules(prefix)
    parallel, shares = source.parallel, source.split.parts(part.experts)
    local = shares[source.split.rank]
    shared = tuple(_shared(loader, part, names.shared))
    experts = source.experts(names.experts[local.start : local.stop], loader.mlp, shared)
    router = _router(loader, part.router, names)
    if parallel.group.is_one:
        return Moe(router, experts, len(shared))
    for number, expert in enumerate(names.experts):
        if number not in local:
            source.elsewhere(expert)
    return ParallelMoe(router, experts, shared=len(shared), parts=tuple(shares), parallel=parallel)


def _shared(loader: LayerLoader, part: parts.Moe, names: MlpModules | None) -> Iterator[Mlp]:
    """Yield the shared experts one by one, which lie side by side."""
    if names is None:
        return
    for number in range(part.shared):
        inner = range(number * part.expert.inner, (number + 1) * part.expert.inner)
        yield loader.split_mlp(names, inner, joins=not loader.source.parallel.reduces)


def _router(loader: LayerLoader, part: parts.Router, names: MoeModules) -> SigmoidRouter:
    source = loader.source
    assert names.router_bias is not None, "check_moe refuses other routers"
    return SigmoidRouter(
        weight=source.raw(weight_name(names.router)).float().t().contiguous(),
        bias=source.raw(names.router_bias).float(),
        routing=part.routing,
        scale=torch.tensor([part.routing.scale], device=source.device),
    )


def _accept(part: Any) -> None:
    """Accept every part of a type."""


def _nothing(part: Any) -> int:
    """Return what a feed-forward part keeps of a token."""
    return 0


Stacks = Iterable[tuple[str, ...]]


def _by_torch(part: Any, prefix: str, max_positions: int) -> None:
    """Have torch run layers with such a part."""


def _mla_stacks(part: parts.Mla, prefix: str, max_positions: int) -> Stacks:
    names = part.modules(prefix)
    return ((names.query_down or names.query_up, names.latent_down),)


def _sparse_stacks(part: parts.SparseMla, prefix: str, max_positions: int) -> Stacks | None:
    if max_positions > part.indexer.topk:
        return None
    return _mla_stacks(part.mla, prefix, max_positions)


def _gqa_stacks(part: parts.Gqa, prefix: str, max_positions: int) -> Stacks:
    names = part.modules(prefix)
    return ((names.query, names.key, names.value),)


def _mlp_stacks(part: parts.GatedMlp, prefix: str, max_positions: int) -> Stacks:
    names = MlpModules.under(prefix)
    return ((names.gate, names.up),)


def _moe_stacks(part: parts.Moe, prefix: str, max_positions: int) -> Stacks:
    names = part.modules(prefix)
    shared = () if names.shared is None else (names.shared,)
    return ((mlp.gate, mlp.up) for mlp in (*names.experts, *shared))


def _slot(part: parts.Mla | parts.Gqa) -> int:
    return part.sizes.slot


def _sparse_slot(part: parts.SparseMla) -> int:
    return part.mla.sizes.slot + part.indexer.head


@dataclass(frozen=True)
class LayerType:
    """Layer that computes parts of one type.

    load makes it of a part, under the prefix of its modules. check raises UnsupportedError for a
    part that is not computed. cached: elements that it keeps of a token. usual_context: tokens of
    the longest context that it takes unless longer ones are asked for, and what bounds them.
    stacks: modules under the prefix that kernels pack as one matrix, where they have one form; None
    where torch runs the layer, given the tokens of the longest context.
    """

    load: Callable[[LayerLoader, Any, str], Any]
    stacks: Callable[[Any, str, int], Stacks | None] = _by_torch
    check: Callable[[Any], None] = _accept
    cached: Callable[[Any], int] = _nothing
    usual_context: Callable[[Any], tuple[int, str]] | None = None


LAYERS: dict[type, LayerType] = {
    parts.Mla: LayerType(load_mla, _mla_stacks, check_rope, _slot),
    parts.SparseMla: LayerType(
        load_sparse_mla, _sparse_stacks, check_rope, _sparse_slot, dense_context
    ),
    parts.Gqa: LayerType(load_gqa, _gqa_stacks, check_rope, _slot),
    parts.GatedMlp: LayerType(load_mlp, _mlp_stacks, check_mlp),
    parts.Moe: LayerType(load_moe, _moe_stacks, check_moe),
}


def load_layer(loader: LayerLoader, layer: LayerSpec) -> DecoderLayer:
    """Load one layer, main or MTP."""
    attention, feed_forward = layer.attention, layer.feed_forward
    return DecoderLayer(
        input_norm=loader.norm(layer.input_norm),
        attention=LAYERS[type(attention)].load(loader, attention, layer.attention_prefix),
        post_norm=loader.norm(layer.post_norm),
        feed_forward=LAYERS[type(feed_forward)].load(
            loader, feed_forward, layer.feed_forward_prefix
        ),
    )


def parts_without_layer(spec: ModelSpec) -> list[str]:
    """Return the names of the parts that the runtime has no layer for."""
    return sorted({type(part).__name__ for part in spec.parts if type(part) not in LAYERS})


def layer_type(part: object) -> LayerType:
    """Return the layer that computes a part.

    Raises UnsupportedError for a part without one, or of a variant that is not computed.
    """
    if type(part) not in LAYERS:
        raise UnsupportedError(
            "The runtime has no layer for a part of this model",
            expected=", ".join(known.__name__ for known in LAYERS),
            found=type(part).__name__,
            todo="Export, quantization and checks of files and weights do without: verify"
            " --level weights. CONTRIBUTING.md says how to add a layer",
        )
    kind = LAYERS[type(part)]
    kind.check(part)
    return kind
