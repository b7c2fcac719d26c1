"""glm4moe: GLM-4.5, 4.6 and 4.7."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import GROUPED, Architecture
from mtp_checkpoints.containers.gguf_architectures.keys_read import (
    KeyReader,
    model_fields,
    rope_fields,
)
from mtp_checkpoints.containers.gguf_architectures.keys_written import grouped_keys, model_keys
from mtp_checkpoints.containers.gguf_values import Keys, Value
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.families.spec import ModelSpec


def _keys(spec: ModelSpec, name: str) -> dict[str, Value]:
    attention = spec.layers[0].attention
    assert isinstance(attention, Gqa), "a model_type of this architecture"
    keys = (*model_keys(spec), *grouped_keys(attention))
    return {f"{name}.{key}": value for key, value in keys}


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    reader = KeyReader(keys, "glm4moe")
    head, rope = reader.whole("attention.key_length"), reader.whole("rope.dimension_count")
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **model_fields(reader, names),
        "num_attention_heads": reader.whole("attention.head_count"),
        "num_key_value_heads": reader.whole("attention.head_count_kv"),
        "head_dim": head,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in names),
        "partial_rotary_factor": rope / head if head else 0.0,
        **rope_fields(reader),
    }


GLM4MOE = Architecture("glm4moe", ("glm4_moe",), GROUPED, _keys, _config)
