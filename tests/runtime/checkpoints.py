"""Small random checkpoints in the released layout, for what needs no trained weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtp_checkpoints.families import family_of, parts
from mtp_checkpoints.families.base import FLOATS, Role
from mtp_runtime.models.layer_types import why_not_computed

SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "torch_dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Values are wider than queries' unrotated part, as in the release.
GLM4_MOE_LITE: dict[str, Any] = SMALL | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 256}
DEEPSEEK_V32: dict[str, Any] = (
    SMALL
    | _INDEXER
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "v_head_dim": 16,
    }
)
GLM_MOE_DSA: dict[str, Any] = (
    GLM4_MOE_LITE
    | _INDEXER
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "full", "shared"],
        "routed_scaling_factor": 2.5,
    }
)
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_OF_NEXT_ALONE = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "rope_theta")
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
QWEN3_5_MOE_TEXT: dict[str, Any] = {
    **{key: value for key, value in QWEN3_NEXT.items() if key not in _OF_NEXT_ALONE},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
QWEN3_5_TEXT: dict[str, Any] = {
    **{key: value for key, value in QWEN3_5_MOE_TEXT.items() if key not in _OF_EXPERTS},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 2,
}


def _with_vision(model_type: str, architecture: str, text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": _VISION | {"model_type": f"{model_type}_vision"},
    }


QWEN3_5 = _with_vision("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5_TEXT)
QWEN3_5_MOE = _with_vision("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE_TEXT)
INTERNS2_MOBIUS: dict[str, Any] = QWEN3_5_MOE | {
    "architectures": ["InternS2MobiusForConditionalGeneration"],
    "model_type": "interns2_mobius",
    "text_config": QWEN3_5_MOE["text_config"]
    | {"num_blocks": 2, "layer_scale": True, "mtp_num_experts": 4, "mtp_num_experts_per_tok": 2},
}
INTERN_S2_PREVIEW: dict[str, Any] = QWEN3_5_MOE | {
    "architectures": ["InternS2PreviewForConditionalGeneration"],
    "model_type": "intern_s2_preview",
}
_DENSE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
_HEADS = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
_ENDS = ("torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
# Of models with grouped-query attention and no experts.
PLAIN: dict[str, Any] = {key: GLM4_MOE[key] for key in (*_DENSE, *_HEADS, *_ENDS)}
MIMO: dict[str, Any] = PLAIN | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "hidden_act": "silu",
    "rope_theta": 640000.0,
    "num_nextn_predict_layers": 1,
}
HY_V3: dict[str, Any] = PLAIN | {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "first_k_dense_replace": 1,
    "qk_norm": True,
    "moe_intermediate_size": 64,
    "expert_hidden_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "route_norm": True,
    "router_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rope_theta": 11158840.0,
    "num_nextn_predict_layers": 1,
}
STEP3P5: dict[str, Any] = {
    **{key: value for key, value in PLAIN.items() if key != "num_key_value_heads"},
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "num_hidden_layers": 4,
    "num_attention_groups": 2,
    "layer_types": [*["full_attention", "sliding_attention"] * 2, *["sliding_attention"] * 3],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 12,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "use_head_wise_attn_gate": True,
    "sliding_window": 32,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "num_nextn_predict_layers": 3,
}
STEP3P7: dict[str, Any] = {
    "architectures": ["Step3p7ForConditionalGeneration"],
    "model_type": "step3p7",
    "text_config": {key: value for key, value in STEP3P5.items() if key != "architectures"},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIMO_V2_FLASH: dict[str, Any] = PLAIN | {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "v_head_dim": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    **_EXPERTS,
}
MIMO_V2: dict[str, Any] = {
    **{key: one for key, one in MIMO_V2_FLASH.items() if not key.endswith("layer_types")},
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "swa_v_head_dim": 8,
    "add_swa_attention_sink_bias": True,
}
_OTHER_EPS = {key: value for key, value in PLAIN.items() if key != "rms_norm_eps"}
NEMOTRON_H: dict[str, Any] = _OTHER_EPS | {
    "layer_norm_epsilon": PLAIN["rms_norm_eps"],
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "MEM*-",
    "mtp_hybrid_override_pattern": "*E",
    "num_nextn_predict_layers": 1,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 96,
    **_EXPERTS,
}
ERNIE4_5_MOE: dict[str, Any] = PLAIN | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "tie_word_embeddings": True,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 1,
    "num_nextn_predict_layers": 1,
}
EXAONE_MOE: dict[str, Any] = PLAIN | {
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 32,
    "num_nextn_predict_layers": 1,
    **_EXPERTS,
}
EXAONE4_5: dict[str, Any] = {
    "architectures": ["Exaone4_5_ForConditionalGeneration"],
    "model_type": "exaone4_5",
    "tie_word_embeddings": False,
    "text_config": PLAIN
    | {
        "model_type": "exaone4",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 32,
        "num_nextn_predict_layers": 1,
    },
    "vision_config": _VISION,
}
LONGCAT_FLASH: dict[str, Any] = {
    **{key: PLAIN[key] for key in ("vocab_size", "hidden_size", *_ENDS, *_HEADS)},
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 2,
    "head_dim": 8,
    **{key: SMALL[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
    **{key: SMALL[key] for key in ("qk_rope_head_dim", "v_head_dim")},
}
GLM_OCR: dict[str, Any] = {
    "architectures": ["GlmOcrForConditionalGeneration"],
    "model_type": "glm_ocr",
    "tie_word_embeddings": False,
    "text_config": PLAIN
    | {"model_type": "glm_ocr_text", "num_nextn_predict_layers": 1, "head_dim": 8},
    "vision_config": _VISION,
}
MELLUM: dict[str, Any] = PLAIN | {
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "num_experts": 8,
    "norm_topk_prob": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "num_nextn_predict_layers": 1,
    **_EXPERTS,
}
BAILING_HYBRID: dict[str, Any] = PLAIN | {
    "architectures": ["BailingHybridForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "short_conv_kernel_size": 4,
    "num_nextn_predict_layers": 1,
    **{key: SMALL[key] for key in ("kv_lora_rank", "qk_nope_head_dim")},
    **{key: SMALL[key] for key in ("qk_rope_head_dim", "v_head_dim")},
    **_EXPERTS,
}
BAILING_MOE_V2: dict[str, Any] = PLAIN | {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe_v2",
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "use_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    **_EXPERTS,
}
_OF_V2 = ("first_k_dense_replace", "n_group", "topk_group", "score_function", "use_qk_norm")
BAILING_MOE: dict[str, Any] = {
    **{key: value for key, value in BAILING_MOE_V2.items() if key not in _OF_V2},
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "moe_router_enable_expert_bias": False,
    "use_qkv_bias": True,
}
BAILING_LINEAR: dict[str, Any] = BAILING_MOE_V2 | {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    **{key: SMALL[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
    **{key: SMALL[key] for key in ("qk_rope_head_dim", "v_head_dim")},
}
INKLING_MODEL: dict[str, Any] = {
    **{
        key: one for key, one in PLAIN.items() if key not in ("intermediate_size", "attention_bias")
    },
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_model",
    "intermediate_size": 64,
    "dense_intermediate_size": 96,
    "dense_mlp_idx": 1,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 32,
    "local_layer_ids": [1, 2],
    "d_rel": 4,
    "rel_extent": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "mtp_config": {
        "num_nextn_predict_layers": 2,
        "local_layer_ids": [1],
        "chain_hidden_post_norm": True,
    },
}
_OF_WHOLE = ("architectures", "mtp_config")
INKLING_MM_MODEL: dict[str, Any] = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "mtp_config": INKLING_MODEL["mtp_config"],
    "text_config": {key: one for key, one in INKLING_MODEL.items() if key not in _OF_WHOLE}
    | {"model_type": "inkling_text"},
    "vision_config": {"patch_size": 2, "num_hidden_layers": 3, "hidden_size": 32},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
}
PANGU_LIKE: dict[str, Any] = {
    **{key: one for key, one in SMALL.items() if key not in ("scoring_func", "topk_method")},
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
_OF_PATTERN = ("architectures", "model_type", "hybrid_override_pattern")
_BLOCKS = ({"n_routed_experts": 4, "moe_intermediate_size": 32}, {"n_routed_experts": 8})
NEMOTRON_H_PUZZLE: dict[str, Any] = {
    **{key: one for key, one in NEMOTRON_H.items() if key not in _OF_PATTERN},
    "architectures": ["NemotronHPuzzleForCausalLM"],
    "model_type": "nemotron_h_puzzle",
    "num_hidden_layers": 4,
    "block_configs": [
        {"block_type": "mamba"},
        {"block_type": "moe"} | _BLOCKS[0],
        {"block_type": "attention"},
        {"block_type": "moe"} | _BLOCKS[1],
    ],
    "mtp_block_configs": [{"block_type": "attention"}, {"block_type": "moe"} | _BLOCKS[0]],
}
NEMOTRON_H_OMNI: dict[str, Any] = {
    "architectures": ["NemotronH_Omni_Reasoning_V3"],
    "model_type": "nemotron_h_omni",
    "tie_word_embeddings": False,
    "text_config": {key: one for key, one in NEMOTRON_H.items() if key != "architectures"},
    "vision_config": {"model_type": "radio", "hidden_size": 32, "intermediate_size": 32}
    | {"num_hidden_layers": 1, "num_attention_heads": 2, "video_temporal_patch_size": 2},
    "projector_hidden_size": 32,
    "vision_hidden_size": 32,
}
GIGACHAT3_5: dict[str, Any] = {
    **PANGU_LIKE,
    "architectures": ["GigaChat35ForCausalLM"],
    "model_type": "gigachat3_5",
    "layer_types": ["linear_attention", "attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "norm_type": "ZeroCenteredGatedNorm",
    "layernorm_type": "pre_post",
    "gated_attention": True,
}
PANGU_ULTRA_MOE: dict[str, Any] = PANGU_LIKE | {
    "architectures": ["PanguUltraMoEForCausalLM"],
    "model_type": "pangu_ultra_moe",
    "router_enable_expert_bias": True,
    "sandwich_norm": True,
}
QWEN3_MOE: dict[str, Any] = PLAIN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    **_EXPERTS,
}
GLM5_NEXT: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "tie_word_embeddings": False,
    "text_config": {
        **{key: one for key, one in PLAIN.items() if key not in ("head_dim", "attention_bias")},
        "model_type": "glm5_next_text",
        "num_key_value_heads": 8,
        "num_hidden_layers": 5,
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 32,
        "index_kpool": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "pad_token_id": 0,
        "num_nextn_predict_layers": 1,
        **{key: SMALL[key] for key in ("q_lora_rank", "kv_lora_rank")},
        **{key: SMALL[key] for key in ("qk_nope_head_dim", "v_head_dim")},
        **_EXPERTS,
    },
    "vision_config": _VISION,
}
DEEPSEEK_V4: dict[str, Any] = {
    **{key: PLAIN[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", *_ENDS)},
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 32,
    "compress_ratios": [0, 4, 128],
    "sliding_window": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 32,
    "hc_mult": 2,
    "num_hash_layers": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    **_EXPERTS,
}
_LATENT = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
DOTS3_NOTE: dict[str, Any] = {
    **{key: one for key, one in PLAIN.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["Dots3NoteForCausalLM"],
    "model_type": "dots3_note",
    "pad_token_id": 0,
    "num_key_value_heads": 8,
    "head_dim": 24,
    "first_k_dense_replace": 1,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "sliding_window_size": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 32,
    "num_nextn_predict_layers": 1,
    **{key: SMALL[key] for key in _LATENT},
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 64,
    "swa_v_head_dim": 16,
    "swa_qk_nope_head_dim": 16,
    "swa_qk_rope_head_dim": 8,
    **_EXPERTS,
}
HY_V4: dict[str, Any] = {
    **{key: one for key, one in PLAIN.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "pad_token_id": 0,
    "num_key_value_heads": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared"],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,
    "hc_mult": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    **{key: SMALL[key] for key in _LATENT},
    **_EXPERTS,
}
QWEN4_EXP_TEXT: dict[str, Any] = {
    **{key: value for key, value in QWEN3_NEXT.items() if key not in _OF_NEXT_ALONE},
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "pad_token_id": 0,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 4,
    "heads_per_ngram": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
    "mtp_num_hidden_layers": 1,
}
del QWEN4_EXP_TEXT["partial_rotary_factor"]
QWEN4_EXP = _with_vision("qwen4_exp", "Qwen4ExpForConditionalGeneration", QWEN4_EXP_TEXT)
# A small config of every family, with at least one MTP layer; contract tests go by it.
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": SMALL,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "deepseek_v4": DEEPSEEK_V4,
    "dots3_note": DOTS3_NOTE,
    "mimo": MIMO,
    "hy_v3": HY_V3,
    "hy_v4": HY_V4,
    "step3p5": STEP3P5,
    "step3p7": STEP3P7,
    "mimo_v2_flash": MIMO_V2_FLASH,
    "mimo_v2": MIMO_V2,
    "nemotron_h": NEMOTRON_H,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "exaone_moe": EXAONE_MOE,
    "exaone4_5": EXAONE4_5,
    "longcat_flash": LONGCAT_FLASH,
    "glm_ocr": GLM_OCR,
    "mellum": MELLUM,
    "glm5_next": GLM5_NEXT,
    "bailing_hybrid": BAILING_HYBRID,
    "BailingMoeV2_5ForCausalLM": BAILING_LINEAR,
    "bailing_moe": BAILING_MOE,
    "bailing_moe_v2": BAILING_MOE_V2,
    "pangu_ultra_moe": PANGU_ULTRA_MOE,
    "qwen3_moe": QWEN3_MOE,
    "inkling_mm_model": INKLING_MM_MODEL,
    "inkling_model": INKLING_MODEL,
    "intern_s2_preview": INTERN_S2_PREVIEW,
    "interns2_mobius": INTERNS2_MOBIUS,
    "nemotron_h_puzzle": NEMOTRON_H_PUZZLE,
    "nemotron_h_omni": NEMOTRON_H_OMNI,
    "gigachat3_5": GIGACHAT3_5,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen4_exp": QWEN4_EXP,
    "qwen4_exp_text": QWEN4_EXP_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
}
# Those that the runtime computes; the others are exported, quantized and judged by their tensors.
COMPUTED = tuple(
    name for name, config in SMALL_CONFIGS.items() if not why_not_computed(family_of(config))
)
# Families whose attention the kernels divide among ranks: without states of requests, sliding
# windows and gates of heads.
UNDIVIDED = parts.GatedDeltaNet | parts.Mamba2 | parts.SlidingGqa | parts.HeadGatedGqa
DIVIDED = tuple(
    name
    for name in COMPUTED
    if not any(isinstance(part, UNDIVIDED) for part in family_of(SMALL_CONFIGS[name]).parts)
)
# Families whose modules trainings take: one module, without a sliding window.
TRAINED = tuple(
    name
    for name in COMPUTED
    if len(modules := family_of(SMALL_CONFIGS[name]).mtp) == 1
    and getattr(modules[0].layer.attention, "window", None) is None
)
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config's decoder."""
    return config.get("text_config") or config


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with changes of its decoder's fields."""
    if "text_config" not in config:
        return config | changes
    return config | {"text_config": config["text_config"] | changes}


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    names: Collection[str] = (),
) -> Path:
    """Random float32 weights for every tensor of the config, in one file; of a vision tower one.

    names: some tensors', which tell what the config does not.
    """
    config = SMALL if config is None else config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    family = family_of(config, names)
    for spec in family.tensors.values():
        if spec.optional:
            continue
        values = torch.randn(spec.shape, generator=generator)
        if spec.dtypes[0] not in FLOATS:
            tensors[spec.name] = torch.randint(2, spec.shape, generator=generator)
        elif spec.role is Role.NORM:
            of_stream = not spec.name.endswith("linear_attn.norm.weight")
            mean = 1 - family.facts.norm_offset if of_stream else 1
            tensors[spec.name] = mean + 0.1 * values
        elif len(spec.shape) == 1:
            tensors[spec.name] = 0.1 * values
        else:
            tensors[spec.name] = values * spec.shape[-1] ** -0.5
    for prefix in family.carried:
        tensors[f"{prefix}pos_embed.weight"] = torch.randn([4, 32], generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
