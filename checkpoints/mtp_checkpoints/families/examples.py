"""Examples of families: a small config.json of each, and the classes of others that load what it
promises. Each family's file has its own; here is what several are made of.

Checkpoints that tests write, and the table in docs/models.md, are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """An engine's class that loads what a family exports of its example.

    fields: those of config.json that it reads and the family does not. module: SGLang's file of it.
    layers: the MTP layers of which it loads the first. needs_gpu: it is built once what needs a GPU
    is replaced. left: parts of the names of tensors that it leaves.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    layers: int = 1
    needs_gpu: bool = False
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A small config.json with at least one MTP layer, and what its tensors are compared with.

    in_transformers: transformers has a class of the main model, by the config's architecture, or by
    that of `like`: another model's config, of the same main tensors. mtp_model: fields that
    transformers' MtpModel needs to load the MTP layers, None where it does not. vllm and sglang:
    engines' classes of the draft, vllm_main and sglang_main of main models that transformers has
    none of. whole: fields of the whole config that vLLM's read, where the model's own are a part of
    it.
    """

    config: Config
    in_transformers: bool = True
    like: Config | None = None
    mtp_model: Mapping[str, Any] | None = None
    vllm: Reader | None = None
    vllm_main: Reader | None = None
    sglang: Reader | None = None
    sglang_main: Reader | None = None
    whole: Mapping[str, Any] = field(default_factory=dict)


SMALL: Config = {
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
GLM4_MOE: Config = {
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
GLM4_MOE_LITE: Config = SMALL | {
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
INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 256}
QWEN3_NEXT: Config = {
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
OF_NEXT_ALONE = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "rope_theta")
QWEN3_5_MOE_TEXT: Config = {
    **{key: value for key, value in QWEN3_NEXT.items() if key not in OF_NEXT_ALONE},
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
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 2,
}


def with_vision(model_type: str, architecture: str, text: Config) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": VISION | {"model_type": f"{model_type}_vision"},
    }


QWEN3_5_MOE = with_vision("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE_TEXT)
DENSE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
HEADS = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
ENDS = ("torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
# Of models with grouped-query attention and no experts.
PLAIN: Config = {key: GLM4_MOE[key] for key in (*DENSE, *HEADS, *ENDS)}
STEP3P5: Config = {
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
EXPERTS: Config = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
OTHER_EPS = {key: value for key, value in PLAIN.items() if key != "rms_norm_eps"}
NEMOTRON_H: Config = OTHER_EPS | {
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
    **EXPERTS,
}
BAILING_MOE_V2: Config = PLAIN | {
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
    **EXPERTS,
}
PANGU_LIKE: Config = {
    **{key: one for key, one in SMALL.items() if key not in ("scoring_func", "topk_method")},
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
