"""Families whose MTP layers, or main models, vLLM's own classes load on a CPU."""

from __future__ import annotations

from typing import Any

# vLLM's class; fields that its classes read and ours do not; the share of the layers that it loads.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "hy_v3": ("HYV3MTP", {}, 1),
    # vLLM derives the width of a head from the others.
    "mimo": ("MiMoMTP", {"head_dim": 8}, 1),
    "glm_ocr": ("GlmOcrMTP", {}, 1),
    "qwen3_next": ("Qwen3NextMTP", {}, 1),
    "qwen3_5": ("Qwen3_5MTP", {}, 1),
    "qwen3_5_moe": ("Qwen3_5MoeMTP", {}, 1),
    "ernie4_5_moe": ("ErnieMTP", {}, 1),
    "exaone_moe": ("ExaoneMoeMTP", {}, 1),
    "longcat_flash": (
        "LongCatFlashMTP",
        # 512 + 64 is what vLLM's latent attention takes on a CPU.
        {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "rope_theta": 1e6}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 32},
        1,
    ),
    "BailingMoeV2_5ForCausalLM": (
        "BailingMoeV25MTPModel",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 32},
        1,
    ),
    "pangu_ultra_moe": (
        "OpenPanguMTP",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
        1,
    ),
    # vLLM loads the first of its three layers.
    "mimo_v2_flash": (
        "MiMoV2MTP",
        {"layernorm_epsilon": 1e-5, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1]}
        | {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
        | {"swa_v_head_dim": 8, "add_swa_attention_sink_bias": True, "attention_value_scale": 0.7}
        | {"swa_rope_theta": 10000, "partial_rotary_factor": 0.5, "sliding_window_size": 32},
        3,
    ),
}
# Of those that transformers has no class for: vLLM's of the main model, and fields that it reads.
_LATENT = CASES["BailingMoeV2_5ForCausalLM"][1] | {"use_qkv_bias": False}
_LING = {"embedding_dropout": 0.0, "use_qkv_bias": False, "use_rmsnorm": True, "rope_theta": 1e4}
MAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_moe": ("BailingMoeForCausalLM", _LING | {"first_k_dense_replace": 0}),
    "bailing_moe_v2": ("BailingMoeV2ForCausalLM", _LING),
    "BailingMoeV2_5ForCausalLM": ("BailingMoeV25ForCausalLM", _LATENT),
    "pangu_ultra_moe": ("PanguUltraMoEForCausalLM", CASES["pangu_ultra_moe"][1]),
    "mimo_v2": (
        "MiMoV2ForCausalLM",
        CASES["mimo_v2_flash"][1]
        | {"attention_bias": False, "hidden_act": "silu", "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 1.0, "n_shared_experts": None, "topk_method": "noaux_tc"},
    ),
}
