"""Small random checkpoints in the released layout, for what needs no trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role

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
# A small config of every family, with at least one MTP layer; contract tests go by it.
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": SMALL,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def write_checkpoint(folder: Path, config: dict[str, Any] | None = None, seed: int = 0) -> Path:
    """Random float32 weights for every tensor of the config, in one file."""
    config = SMALL if config is None else config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in family_of(config).tensors.values():
        if spec.optional:
            continue
        values = torch.randn(spec.shape, generator=generator)
        if spec.role is Role.NORM:
            tensors[spec.name] = 1 + 0.1 * values
        elif len(spec.shape) == 1:
            tensors[spec.name] = 0.1 * values
        else:
            tensors[spec.name] = values * spec.shape[1] ** -0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
