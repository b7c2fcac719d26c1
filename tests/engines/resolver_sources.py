"""Checkpoints whose quantized bundles the engines' resolvers read: DeepSeek-V3 from fp8 and from
bf16, and every other family in the precision of its release."""

from __future__ import annotations

from typing import Any

from cases import WHOLE_TILES
from mtp_checkpoints.quantization.native import NATIVE_FP8
from runtime.checkpoints import SMALL_CONFIGS

# SGLang rewrites the literal 61; 512 + 64 is what vLLM's MLA takes on a CPU.
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DEEPSEEK = WHOLE_TILES | _LATENT | {"num_hidden_layers": 61}
# Whole tiles in every linear.
_SIZES: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
_GROUPED = _SIZES | {"num_attention_heads": 4, "head_dim": 32}
_MLA = _SIZES | _LATENT | {"q_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 32}
_INDEXED = _MLA | {
    "quantization_config": NATIVE_FP8,
    "index_n_heads": 4,
    "index_head_dim": 128,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": _GROUPED,
    "glm4_moe_lite": _MLA,
    "deepseek_v32": _INDEXED | {"num_hidden_layers": 61},
    "glm_moe_dsa": _INDEXED,
}
SOURCES: dict[str, dict[str, Any]] = {
    "fp8": _DEEPSEEK,
    "bf16": {key: value for key, value in _DEEPSEEK.items() if key != "quantization_config"},
    **{model_type: SMALL_CONFIGS[model_type] | more for model_type, more in _CHANGES.items()},
}
