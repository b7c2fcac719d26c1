"""qwen35moe: Qwen3.5 and 3.6 with a mixture of experts, without their vision tower."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_architectures.gated_delta_keys import (
    FLAT,
    RECURRENT,
    expert_fields,
    flat_forms,
    gated_delta_fields,
    is_recurrent,
)
from mtp_checkpoints.containers.gguf_architectures.keys_read import KeyReader
from mtp_checkpoints.containers.gguf_architectures.qwen35 import sectioned_keys
from mtp_checkpoints.containers.gguf_values import Keys

_NAME = "qwen35moe"


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    reader = KeyReader(keys, _NAME)
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        **gated_delta_fields(reader, names),
        **expert_fields(reader),
    }


QWEN35MOE = Architecture(
    _NAME,
    ("qwen3_5_moe", "qwen3_5_moe_text"),
    FLAT,
    sectioned_keys,
    _config,
    forms=lambda keys: flat_forms(keys, _NAME),
    has_mtp_names=True,
    layer_flags={RECURRENT: is_recurrent},
)
