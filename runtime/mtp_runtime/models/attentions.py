"""Attentions of every kind, loaded by their parts: of several ranks each loads its own heads."""

from __future__ import annotations

import torch

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import parts
from mtp_checkpoints.families.base import TensorMaker, weight_name
from mtp_checkpoints.families.parts.sparse_mla import IndexerModules
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.gqa import Gqa
from mtp_runtime.layers.mla import Mla
from mtp_runtime.layers.norm import LayerNorm
from mtp_runtime.layers.rope import rotate_first_pairs, rotate_halves, softmax_scale
from mtp_runtime.layers.sparse_mla import Indexer, SparseMla
from mtp_runtime.models.layer_loader import LayerLoader

_KEY_NORM_EPS = 1e-6  # of an indexer, whatever rms_norm_eps is


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
    """Load latent attention; the halves of kv_b_proj become dense to be absorbed."""
    source, sizes, names = loader.source, part.sizes, part.modules(prefix)
    heads = source.split.nonempty_parts(sizes.heads, "heads")
    local = heads[source.split.rank]
    query = _rows(local, sizes.nope + sizes.rope)
    down = names.query_down
    halves = source.dense_matrix(names.latent_up, _rows(local, sizes.nope + sizes.value))
    halves = halves.view(len(local), sizes.nope + sizes.value, sizes.latent)
    return Mla(
        down=loader.joined(
            source.weight(down) if down else source.weight(names.query_up, query),
            source.weight(names.latent_down),
        ),
        query_norm=None if names.query_norm is None else loader.norm(names.query_norm),
        query_up=source.linear(names.query_up, query) if down else None,
        latent_norm=loader.norm(names.latent_norm),
        key_up=halves[:, : sizes.nope].contiguous(),
        value_up=halves[:, sizes.nope :].transpose(1, 2).contiguous(),
        output=source.row_parallel(names.output, [_rows(p, sizes.value) for p in heads]),
        rope=loader.rope(part.rope),
        sizes=sizes._replace(heads=len(local)),
        scale=softmax_scale(part.rope, sizes.nope + sizes.rope),
    )


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
