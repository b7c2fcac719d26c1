"""Shapes of released models, one per family: config.json as far as tensors and loaders read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.families.released import DEEPSEEK_V3
from mtp_checkpoints.quantization.native import NATIVE_FP8

COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEPSEEK: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_V3: dict[str, Any] = (
    DEEPSEEK
    | DEEPSEEK_V3
    | {
        "max_position_embeddings": 163840,
        "n_group": 8,
        "num_key_value_heads": 128,
        "quantization_config": NATIVE_FP8,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    }
)
_GLM: dict[str, Any] = COMMON | {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
}
_QWEN: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN3_5: dict[str, Any] = _QWEN | {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "vocab_size": 248320,
}


@dataclass(frozen=True)
class Released:
    """A released model, of one with a vision tower the text part; own_copies: its MTP layer stores
    embedding and head too."""

    title: str
    config: dict[str, Any]
    own_copies: bool


RELEASED: dict[str, Released] = {
    "deepseek_v3": Released("DeepSeek-V3", _V3, own_copies=True),
    "glm4_moe": Released(
        "GLM-4.6",
        _GLM
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 92,
            "first_k_dense_replace": 3,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 202752,
            "vocab_size": 151552,
        },
        own_copies=False,
    ),
    "glm4_moe_lite": Released(
        "GLM-4.7-Flash",
        _GLM
        | {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "attention_bias": False,
            "topk_method": "noaux_tc",
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "first_k_dense_replace": 1,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "max_position_embeddings": 202752,
            "vocab_size": 154880,
        },
        own_copies=True,
    ),
    "deepseek_v32": Released(
        "DeepSeek-V3.2",
        _V3
        | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 2048,
            "quantization_config": NATIVE_FP8 | {"scale_fmt": "ue8m0"},
        },
        own_copies=True,
    ),
    "glm_moe_dsa": Released(
        "GLM-5.1",
        _GLM
        | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "attention_bias": False,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 78,
            "first_k_dense_replace": 3,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
            "max_position_embeddings": 202752,
            "vocab_size": 154880,
        },
        own_copies=False,
    ),
    "qwen3_next": Released(
        "Qwen3-Next-80B-A3B",
        _QWEN
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "tie_word_embeddings": False,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "vocab_size": 151936,
        },
        own_copies=False,
    ),
    "qwen3_5": Released(
        "Qwen3.5-0.8B",
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "text_config": _QWEN3_5
            | {
                "model_type": "qwen3_5_text",
                "tie_word_embeddings": True,
                "hidden_size": 1024,
                "intermediate_size": 3584,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "linear_num_value_heads": 16,
            },
        },
        own_copies=False,
    ),
    "qwen3_5_moe": Released(
        "Qwen3.5-35B-A3B",
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False,
            "text_config": _QWEN3_5
            | {
                "model_type": "qwen3_5_moe_text",
                "hidden_size": 2048,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_hidden_layers": 40,
                "num_attention_heads": 16,
                "linear_num_value_heads": 32,
                "num_experts": 256,
                "num_experts_per_tok": 8,
            },
        },
        own_copies=False,
    ),
}
