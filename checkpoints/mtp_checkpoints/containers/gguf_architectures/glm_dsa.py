"""glm-dsa: GLM-5, 5.1 and 5.2, of which the last has layers without indexers of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_architectures.deepseek32 import (
    SPARSE,
    sparse_fields,
    sparse_keys,
)
from mtp_checkpoints.containers.gguf_architectures.keys_read import KeyReader
from mtp_checkpoints.containers.gguf_values import Keys, Value, booleans
from mtp_checkpoints.families.parts.sparse_mla import SparseMla
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec

_NAME = "glm-dsa"
_TYPES = "attention.indexer.types"


def _keys(spec: ModelSpec, name: str) -> dict[str, Value]:
    keys = {f"{name}.{key}": value for key, value in sparse_keys(spec)}
    full = [_chooses(layer) for layer in spec.layers]
    return keys if all(full) else {**keys, f"{name}.{_TYPES}": booleans(full)}


def _chooses(layer: LayerSpec) -> bool:
    """Return whether a layer has an indexer of its own."""
    attention = layer.attention
    assert isinstance(attention, SparseMla), "a model_type of this architecture"
    return attention.chooses(layer.attention_prefix)


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    reader = KeyReader(keys, _NAME)
    types: dict[str, Any] = {}
    if reader.has(_TYPES):
        types["indexer_types"] = ["full" if full else "shared" for full in reader.flags(_TYPES)]
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **sparse_fields(reader, names),
        **types,
    }


GLM_DSA = Architecture(_NAME, ("glm_moe_dsa",), SPARSE, _keys, _config)
