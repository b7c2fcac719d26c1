"""Attention layers: what loads them of their parts, and what the kernels pack of them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import TensorMaker, weight_name
from mtp_checkpoints.families.parts.gated_delta import GatedDeltaNetModules
from mtp_checkpoints.families.parts.sparse_mla import IndexerModules
from mtp_checkpoints.families.spec import LayerSpec
from mtp_kernels.sizes import LatentSizes
from mtp_kernels.state_space import StateSpaceWeights
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet, GatedNorm
from mtp_runtime.layers.gqa import GatedGqa, Gqa, HeadGatedGqa, SlidingGqa
from mtp_runtime.layers.linear import Linear, UnreadWeight, Weight, dense
from mtp_runtime.layers.mamba2 import GatedGroupNorm, Mamba2
from mtp_runtime.layers.mla import Halves, Mla, StoredHalves
from mtp_runtime.layers.norm import LayerNorm, RmsNorm
from mtp_runtime.layers.rope import rotate_first_pairs, rotate_halves, softmax_scale
from mtp_runtime.layers.shared_gqa import SharedGqa
from mtp_runtime.layers.sparse_mla import Indexer, SparseMla
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.layer_loader import LayerLoader, Stacks

_KEY_NORM_EPS = 1e-6  # of an indexer, whatever rms_norm_eps is


def check_rope(part: parts.Mla | parts.SparseMla | parts.Gqa) -> None:
    """Raise UnsupportedError for a rotary scaling other than YaRN's and Llama 3.1's, or a YaRN that
    leaves the original positions open."""
    rope = part.rope
    stretched = rope.yarn is not None and rope.yarn.original_positions is not None
    if rope.scaling != parts.PLAIN and not stretched and rope.llama3 is None:
        raise UnsupportedError(
            "config.json asks for a rotary scaling that the runtime does not have",
            expected="default, llama3, or yarn with original_max_position_embeddings",
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
    """Load grouped-query attention, each key head with the queries that share it, and their gates
    where there are some."""
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    groups = source.split.nonempty_parts(sizes.kv_heads, "key heads")
    local, each = groups[source.split.rank], sizes.heads // sizes.kv_heads
    projected = sizes.queries // sizes.kv_heads * sizes.head
    rows = {
        names.query: _rows(local, projected),
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
    made = GatedGqa if sizes.is_gated else Gqa
    return made(
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


def load_sliding_gqa(loader: LayerLoader, part: parts.SlidingGqa, prefix: str) -> SlidingGqa:
    """Load grouped-query attention to the last tokens alone."""
    return SlidingGqa(**vars(load_gqa(loader, part, prefix)), window=part.window)


def load_head_gated_gqa(loader: LayerLoader, part: parts.HeadGatedGqa, prefix: str) -> HeadGatedGqa:
    """Load grouped-query attention with a gate of each head."""
    source, sizes = loader.source, part.sizes
    groups = source.split.nonempty_parts(sizes.kv_heads, "key heads")
    rows = _rows(groups[source.split.rank], sizes.heads // sizes.kv_heads)
    return HeadGatedGqa(
        **vars(load_gqa(loader, part, prefix)),
        gates=source.linear(part.gates(prefix), rows),
        window=part.window,
    )


def load_shared_gqa(loader: LayerLoader, part: parts.SharedGqa, prefix: str) -> SharedGqa:
    """Load grouped-query attention whose keys and values may be another layer's."""
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    groups = source.split.nonempty_parts(sizes.kv_heads, "key heads")
    local, each = groups[source.split.rank], sizes.heads // sizes.kv_heads * sizes.head
    assert names.query_norm is not None and names.key_norm is not None, "part of the attention"
    of_queries, *of_keys = part.linears(prefix)
    rows = {of_queries: _rows(local, each)} | dict.fromkeys(of_keys, _rows(local, sizes.head))
    unscaled = torch.ones(sizes.head, device=source.device)
    value_norm = RmsNorm(unscaled, loader.facts.norm_eps)
    return SharedGqa(
        qkv=loader.joined(*(source.weight(module, share) for module, share in rows.items())),
        bias=None,
        query_norm=loader.norm(names.query_norm),
        key_norm=value_norm if part.reads else loader.norm(names.key_norm),
        output=source.row_parallel(names.output, [_rows(share, each) for share in groups]),
        rope=loader.rope(part.rope),
        sizes=sizes._replace(heads=each // sizes.head * len(local), kv_heads=len(local)),
        value_norm=value_norm,
        window=part.window,
        keeps=part.keeps,
        reads=part.reads,
    )


def load_gated_delta_net(
    loader: LayerLoader, part: parts.GatedDeltaNet, prefix: str
) -> GatedDeltaNet:
    """Load a gated delta net, rows of its projections in the order in which it takes them."""
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    loader.refuse_ranks(prefix, "a gated delta net")
    inputs, gate_inputs = _delta_inputs(source, part, names)
    convolution = source.tensor(weight_name(names.convolution)).flatten(1)  # [channels, width]
    return GatedDeltaNet(
        inputs=loader.joined(*inputs),
        gate_inputs=loader.joined(*gate_inputs),
        convolution=convolution.contiguous(),
        rate=-source.raw(names.decay).float().exp(),
        bias=source.raw(names.bias).float(),
        norm=GatedNorm(source.raw(weight_name(names.norm)).float(), loader.facts.norm_eps),
        output=source.linear(names.output),
        sizes=sizes,
    )


def load_mamba2(loader: LayerLoader, part: parts.Mamba2, prefix: str) -> Mamba2:
    """Load a Mamba-2 layer, with the channels of its convolution in the order in which they are
    taken: queries and keys, which the checkpoint has behind the values, first."""
    loader.refuse_ranks(prefix, "a Mamba-2 layer")
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    values, keys = sizes.output, sizes.key_heads * sizes.key

    def channels(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.split(tensor, [values, keys, keys])[::-1])

    return Mamba2(
        inputs=source.linear(names.inputs),
        weights=StateSpaceWeights(
            channels(source.tensor(weight_name(names.convolution)).flatten(1)),
            channels(source.tensor(f"{names.convolution}.bias")),
            skip=source.raw(names.skip).float(),
        ),
        rate=-source.raw(names.rate).float().exp(),
        bias=source.raw(names.bias).float(),
        norm=GatedGroupNorm(
            source.raw(weight_name(names.norm)).float(), loader.facts.norm_eps, sizes.key_heads
        ),
        output=source.linear(names.output),
        sizes=sizes,
    )


def load_plain_gqa(loader: LayerLoader, part: parts.PlainGqa, prefix: str) -> Gqa:
    """Load grouped-query attention without positions."""
    return load_gqa(loader, part.gqa, prefix)


def mla_stacks(part: parts.Mla, prefix: str, max_positions: int) -> Stacks:
    names = part.modules(prefix)
    return ((names.query_down or names.query_up, names.latent_down),)


def sparse_stacks(part: parts.SparseMla, prefix: str, max_positions: int) -> Stacks | None:
    if max_positions > part.indexer.topk:
        return None
    return mla_stacks(part.mla, prefix, max_positions)


def gqa_stacks(part: parts.Gqa, prefix: str, max_positions: int) -> Stacks:
    names = part.modules(prefix)
    return ((names.query, names.key, names.value),)


def delta_stacks(part: parts.GatedDeltaNet, prefix: str, max_positions: int) -> Stacks | None:
    if not part.sizes.has_whole_vectors:
        return None
    inputs = part.modules(prefix).inputs
    return inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]


def slot(part: parts.Mla | parts.Gqa) -> int:
    return part.sizes.slot


def own_slot(part: parts.SharedGqa) -> int:
    return part.slot


def sparse_slot(part: parts.SparseMla) -> int:
    return part.mla.sizes.slot + part.indexer.head


def _delta_inputs(
    source: WeightSource, part: parts.GatedDeltaNet, names: GatedDeltaNetModules
) -> tuple[list[Weight], list[Weight]]:
    """Load projections to [queries | keys | values | output gates] and to [betas | decays], which
    some checkpoints keep sorted by key head."""
    if not part.is_interleaved:
        first, gate, beta, decay = (source.weight(module) for module in names.inputs)
        return [first, gate], [beta, decay]
    sizes, (together, gates) = part.sizes, names.inputs
    each = sizes.value_heads // sizes.key_heads
    values = each * sizes.value
    widths = (sizes.key, sizes.key, values, values)
    return (
        _of_key_heads(source, together, sizes.key_heads, widths),
        _of_key_heads(source, gates, sizes.key_heads, (each, each)),
    )


def _of_key_heads(
    source: WeightSource, module: str, heads: int, widths: tuple[int, ...]
) -> list[Weight]:
    """Load rows that a matrix has by key head, those of several kinds side by side, by kind."""
    ends = list(accumulate(widths, initial=0))
    return [
        source.weight(module, range(head * ends[-1] + start, head * ends[-1] + end))
        for start, end in pairwise(ends)
        for head in range(heads)
    ]


def plain_slot(part: parts.PlainGqa) -> int:
    return slot(part.gqa)


def delta_state(part: parts.GatedDeltaNet | parts.Mamba2) -> int:
    sizes = part.sizes
    return sizes.value_heads * sizes.value * sizes.key + (sizes.width - 1) * sizes.channels


def _rows(heads: range, size: int) -> range:
    """Return the rows of some heads of a size each."""
    return range(heads.start * size, heads.stop * size)
