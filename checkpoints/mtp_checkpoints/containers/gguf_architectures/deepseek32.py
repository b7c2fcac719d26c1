"""deepseek32: DeepSeek-V3.2, whose indexers are beside the latent attention of deepseek2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import COMMON, Architecture
from mtp_checkpoints.containers.gguf_architectures.deepseek2 import LATENT
from mtp_checkpoints.containers.gguf_architectures.keys_read import (
    KeyReader,
    latent_fields,
    model_fields,
)
from mtp_checkpoints.containers.gguf_architectures.keys_written import latent_keys, model_keys
from mtp_checkpoints.containers.gguf_values import Keys, Value, u32
from mtp_checkpoints.families.parts.sparse_mla import SparseMla
from mtp_checkpoints.families.spec import ModelSpec

SPARSE: Mapping[str, str] = {
    **COMMON,
    **LATENT,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


def sparse_keys(spec: ModelSpec) -> Iterator[tuple[str, Value]]:
    """Yield the keys of a model of latent attention with indexers."""
    attention = spec.layers[0].attention
    assert isinstance(attention, SparseMla), "a model_type of these architectures"
    yield from model_keys(spec)
    yield from latent_keys(attention.mla)
    yield "attention.indexer.head_count", u32(attention.indexer.heads)
    yield "attention.indexer.key_length", u32(attention.indexer.head)
    yield "attention.indexer.top_k", u32(attention.indexer.topk)


def sparse_fields(reader: KeyReader, names: Collection[str]) -> dict[str, Any]:
    """Return the fields of a model of latent attention with indexers."""
    return {
        **model_fields(reader, names),
        **latent_fields(reader),
        "index_n_heads": reader.whole("attention.indexer.head_count"),
        "index_head_dim": reader.whole("attention.indexer.key_length"),
        "index_topk": reader.whole("attention.indexer.top_k"),
    }


def _keys(spec: ModelSpec, name: str) -> dict[str, Value]:
    return {f"{name}.{key}": value for key, value in sparse_keys(spec)}


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **sparse_fields(KeyReader(keys, "deepseek32"), names),
    }


DEEPSEEK32 = Architecture("deepseek32", ("deepseek_v32",), SPARSE, _keys, _config)
