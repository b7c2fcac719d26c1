"""qwen3next: Qwen3-Next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_architectures.gated_delta_keys import (
    INTERLEAVED,
    RECURRENT,
    expert_fields,
    gated_delta_fields,
    gated_delta_keys,
    interleaved_forms,
    is_recurrent,
)
from mtp_checkpoints.containers.gguf_architectures.keys_read import KeyReader
from mtp_checkpoints.containers.gguf_values import Keys, Value
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.spec import ModelSpec

_NAME = "qwen3next"


def _keys(spec: ModelSpec, name: str) -> dict[str, Value]:
    moe = spec.layers[0].feed_forward
    if isinstance(moe, Moe) and not moe.router.routing.normalises:
        raise UnsupportedError(
            "llama.cpp makes the weights of Qwen3-Next's experts sum to 1",
            expected="norm_topk_prob true in config.json",
            found="false",
            todo="Use --target hf",
        )
    return {f"{name}.{key}": value for key, value in gated_delta_keys(spec)}


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    reader = KeyReader(keys, _NAME)
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **gated_delta_fields(reader, names),
        **expert_fields(reader),
        "norm_topk_prob": True,
    }


QWEN3NEXT = Architecture(
    _NAME,
    ("qwen3_next",),
    INTERLEAVED,
    _keys,
    _config,
    forms=lambda keys: interleaved_forms(keys, _NAME),
    has_mtp_names=True,
    layer_flags={RECURRENT: is_recurrent},
)
