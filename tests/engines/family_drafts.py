"""Families whose MTP layers, or main models, vLLM's or SGLang's own classes load on a CPU, some of
them once what needs a GPU is replaced."""

from __future__ import annotations

from typing import Any

from runtime.checkpoints import SMALL_CONFIGS

_MIMO_V2: dict[str, Any] = (
    {"layernorm_epsilon": 1e-5, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1]}
    | {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
    | {"swa_v_head_dim": 8, "add_swa_attention_sink_bias": True, "attention_value_scale": 0.7}
    | {"swa_rope_theta": 10000, "partial_rotary_factor": 0.5, "sliding_window_size": 32}
)
_MIMO_V2_MORE: dict[str, Any] = (
    {"attention_bias": False, "hidden_act": "silu", "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 1.0, "n_shared_experts": None, "topk_method": "noaux_tc"}
)  # fmt: skip
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
    # vLLM loads the first of their three layers.
    "mimo_v2_flash": ("MiMoV2MTP", _MIMO_V2, 3),
    "mimo_v2": ("MiMoV2MTP", _MIMO_V2 | _MIMO_V2_MORE, 3),
    "bailing_hybrid": (
        "BailingMoeV3MTPModel",
        # Without it vLLM's and SGLang's latent attention has no gates, transformers' always has.
        {"gated_attention_proj_granularity_type": "head_wise"}
        | {"architectures": ["BailingMoeV3ForCausalLM"], "moe_shared_expert_intermediate_size": 64}
        | {"use_bias": False},
        1,
    ),
}
RUN = frozenset({"mimo"})  # test_mimo_contract runs the module of these
# Those that are built once what needs a GPU is replaced.
_PUZZLE = {"n_routed_experts": 8, "moe_intermediate_size": 64}
GPU_ONLY: dict[str, tuple[str, dict[str, Any], int]] = {
    "nemotron_h": ("NemotronHMTP", {}, 1),
    "nemotron_h_omni": ("NemotronHMTP", {}, 1),
    # vLLM reads the counts of all layers, not those of the blocks.
    "nemotron_h_puzzle": (
        "NemotronHMTP",
        {"mtp_block_configs": [{"block_type": "attention"}, {"block_type": "moe"} | _PUZZLE]}
        | {"routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
        | {"mlp_hidden_act": "relu2", "mtp_hybrid_override_pattern": "*E"}
        | {"mtp_n_routed_experts": 8},
        1,
    ),
    # Without it vLLM's has vectors of the MTP layer's own, which it does not ask for.
    "interns2_mobius": ("InternS2MobiusMTP", {"layer_scale": False}, 1),
    "intern_s2_preview": ("Qwen3_5MoeMTP", {}, 1),
    "dots3_note": (
        "Dots3NoteMTP",
        {"swa_attention_gate_type": "headwise", "attention_gate_type": "headwise"}
        | {"swa_rope_theta": 10000.0, "apply_mla_qkv_lora_rescale": True},
        1,
    ),
    "hy_v4": ("HYV4MTP", {}, 1),
    "glm5_next": (
        "Glm5NextMTP",
        {"mhc": True, "mla_use_nope": True, "indexer_rope_interleave": True, "n_group": 1}
        | {"topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        1,
    ),
    "inkling_mm_model": ("InklingMTP", {"use_global_scale": True}, 1),
    "inkling_model": (
        "InklingMTP",
        {"use_global_scale": True, "architectures": ["InklingForCausalLM"]},
        1,
    ),
    # vLLM has sinks for 64 heads or more.
    "deepseek_v4": (
        "DeepSeekV4MTP",
        {"num_attention_heads": 64, "rms_norm_eps": 1e-6, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
        | {"rope_theta": 1e4, "compress_rope_theta": 1.6e5, "routed_scaling_factor": 1.5}
        | {"norm_topk_prob": True, "hidden_act": "silu", "swiglu_limit": 10.0},
        1,
    ),
    # vLLM fills matrices up to multiples of 16 rows: these have none to fill.
    "qwen4_exp": ("Qwen4ExpMTP", {"hc_lowrank": 14}, 1),
    "qwen4_exp_text": ("Qwen4ExpMTP", {"hc_lowrank": 14}, 1),
}
# Tensors that vLLM leaves, by parts of their names: it builds no indexer in Hy4's MTP layer, as
# layer_types, which its config wants for the main layers alone, has no kind of it.
LEFT = {"hy_v4": (".indexer.",)}
# The same of main models: biases of routers are none of its parameters, and a tower is left out.
LEFT_OF_MAIN = {"inkling_model": (".gate.bias",), "interns2_mobius": (".time_series.",)}
# Of those that transformers has no class for: vLLM's of the main model, and fields that it reads.
_LATENT = CASES["BailingMoeV2_5ForCausalLM"][1] | {"use_qkv_bias": False}
_LING = {"embedding_dropout": 0.0, "use_qkv_bias": False, "use_rmsnorm": True, "rope_theta": 1e4}
MAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_moe": ("BailingMoeForCausalLM", _LING | {"first_k_dense_replace": 0}),
    "bailing_moe_v2": ("BailingMoeV2ForCausalLM", _LING),
    "BailingMoeV2_5ForCausalLM": ("BailingMoeV25ForCausalLM", _LATENT),
    "pangu_ultra_moe": ("PanguUltraMoEForCausalLM", CASES["pangu_ultra_moe"][1]),
    "mimo_v2": ("MiMoV2ForCausalLM", _MIMO_V2 | _MIMO_V2_MORE),
}
# Fields of whole configs, of which a checkpoint of ours has one tensor of the tower.
_VISION: dict[str, Any] = (
    {"hidden_size": 32, "num_heads": 2, "depth": 1, "intermediate_size": 32, "patch_size": 14}
    | {"num_position_embeddings": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    | {"deepstack_visual_indexes": [], "out_hidden_size": 64, "in_channels": 3}
    | {"hidden_act": "gelu_pytorch_tanh"}
)
WHOLE: dict[str, dict[str, Any]] = {
    "interns2_mobius": {"image_token_id": 3, "vision_config": _VISION},
}
GPU_MAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h_puzzle": (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "ME*E", "use_conv_bias": True, "use_bias": False}
        | {"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False}
        | {"mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "routed_scaling_factor": 1.0}
        | {"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    ),
    "inkling_model": (
        "InklingForCausalLM",
        # As below, routers have no rows to fill: 14 experts and 2 shared ones.
        {"shared_expert_sink": True, "use_global_scale": True, "use_embed_norm": True}
        | {"n_routed_experts": 14}
        | {"architectures": ["InklingForCausalLM"]},
    ),
    "interns2_mobius": ("InternS2MobiusForConditionalGeneration", {}),
}
# SGLang's classes of drafts, all that vLLM has none of, or does not build, among them: the module,
# the class, fields that it reads and ours do not, and the share of the layers that it loads.
_KINDS = 46  # it takes the kind of layer 45 for any module
_STEP: dict[str, Any] = (
    {"layer_types": ["sliding_attention"] * _KINDS, "rope_theta": [1e4] * _KINDS}
    | {"partial_rotary_factors": [1.0] * _KINDS, "swiglu_limits_shared": None}
    | {"rope_scaling": None, "yarn_only_types": []}
)
SGLANG: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "bailing_moe": (
        "bailing_moe_nextn",
        "BailingMoeForCausalLMNextN",
        _LING | {"first_k_dense_replace": 0, "use_qkv_bias": True},
        1,
    ),
    "bailing_moe_v2": ("bailing_moe_nextn", "BailingMoeForCausalLMNextN", _LING, 1),
    "step3p5": ("step3p5_mtp", "Step3p5MTP", _STEP, 3),
    "step3p7": ("step3p5_mtp", "Step3p5MTP", _STEP, 3),
    "gigachat3_5": ("gigachat35_mtp", "GigaChat35ForCausalLMNextN", {}, 1),
    "deepseek_v3": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN", {}, 1),
    "glm4_moe": ("glm4_moe_nextn", "Glm4MoeForCausalLMNextN", {}, 1),
    "glm4_moe_lite": ("glm4_moe_lite_nextn", "Glm4MoeLiteForCausalLMNextN", {}, 1),
    "mimo": ("mimo_mtp", "MiMoMTP", {}, 1),
    "hy_v3": ("hunyuan_v3_nextn", "HYV3ForCausalLMNextN", {}, 1),
    "exaone_moe": (
        "exaone_moe_mtp",
        "ExaoneMoEForCausalLMMTP",
        {"pad_token_id": 0, "is_moe_layer": [False, False]},
        1,
    ),
    "ernie4_5_moe": ("ernie4_eagle", "Ernie4_5_MoeForCausalLMMTP", {"use_bias": False}, 1),
    "longcat_flash": (
        "longcat_flash_nextn",
        "LongcatFlashForCausalLMNextN",
        {"intermediate_size": SMALL_CONFIGS["longcat_flash"]["ffn_hidden_size"]}
        | {"mla_scale_q_lora": False, "mla_scale_kv_lora": False},
        1,
    ),
    "qwen3_5_text": (
        "qwen3_5_mtp",
        "Qwen3_5ForCausalLMMTP",
        {"full_attention_interval": 1, "layers_block_type": ["attention"]},
        1,
    ),
    "qwen3_moe": ("qwen3_moe_mtp", "Qwen3MoeForCausalLMMTP", {"attention_bias": False}, 1),
}
SGLANG_MAINS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gigachat3_5": ("gigachat35", "GigaChat35ForCausalLM", {}),
}
