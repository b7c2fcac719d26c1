"""Shapes of the released DeepSeek-V3's config.json, for figures about the real model."""

from __future__ import annotations

from typing import Any

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
