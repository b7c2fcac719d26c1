"""deepseek2: DeepSeek-V3, R1 and V3.1, and GLM-4.7-Flash.

llama.cpp's converter leaves the MTP module of the first three out, though its graph runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtp_checkpoints.containers.gguf_architectures.base import COMMON, HALVES, Architecture
from mtp_checkpoints.containers.gguf_architectures.keys_read import (
    KeyReader,
    latent_fields,
    model_fields,
    pre_tokenizer,
)
from mtp_checkpoints.containers.gguf_architectures.keys_written import latent_keys, model_keys
from mtp_checkpoints.containers.gguf_values import Keys, Value
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.spec import ModelSpec

LATENT: Mapping[str, str] = {
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **{module: f"attn_{half}" for half, module in HALVES.items()},
}
_GLM = "glm4"  # the pre-tokenizer of GLM-4.7-Flash


def _keys(spec: ModelSpec, name: str) -> dict[str, Value]:
    mla = spec.layers[0].attention
    assert isinstance(mla, Mla), "a model_type of this architecture"
    return {f"{name}.{key}": value for key, value in (*model_keys(spec), *latent_keys(mla))}


def _config(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    reader, is_glm = KeyReader(keys, "deepseek2"), pre_tokenizer(keys) == _GLM
    model = "Glm4MoeLite" if is_glm else "DeepseekV3"
    return {
        "architectures": [f"{model}ForCausalLM"],
        "model_type": "glm4_moe_lite" if is_glm else "deepseek_v3",
        **model_fields(reader, names),
        **latent_fields(reader),
    }


DEEPSEEK2 = Architecture(
    "deepseek2", ("deepseek_v3", "glm4_moe_lite"), {**COMMON, **LATENT}, _keys, _config
)
