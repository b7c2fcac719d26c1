"""qwen35: Qwen3.5 and 3.6, dense, without their vision tower."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_architectures.gated_delta_keys import (
    FLAT,
    RECURRENT,
    SECTIONS,
    flat_forms,
    gated_delta_fields,
    gated_delta_keys,
    is_recurrent,
)
from mtp_checkpoints.containers.gguf_architectures.keys_read import KeyReader
from mtp_checkpoints.containers.gguf_values import Keys, Value, i32s
from mtp_checkpoints.families.spec import ModelSpec

_NAME = "qwen35"
_USUAL_SECTIONS = (11, 11, 10, 0)  # of every release; the graph asks for the key


def sectioned_keys(spec: ModelSpec, name: str) -> dict[str, Value]:
    """Return the keys of a model of gated delta nets with those of its positions' sections."""
    keys = {SECTIONS: i32s(_USUAL_SECTIONS), **dict(gated_delta_keys(spec))}
    return {f"{name}.{key}": value for key, value in keys.items()}


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    reader = KeyReader(keys, _NAME)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **gated_delta_fields(reader, names),
        "intermediate_size": reader.whole("feed_forward_length"),
    }


QWEN35 = Architecture(
    _NAME,
    ("qwen3_5", "qwen3_5_text"),
    FLAT,
    sectioned_keys,
    _config,
    forms=lambda keys: flat_forms(keys, _NAME),
    has_mtp_names=True,
    layer_flags={RECURRENT: is_recurrent},
)
