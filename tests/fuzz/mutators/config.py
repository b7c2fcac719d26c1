"""Sets fields of config.json, present ones and others that readers know, to nasty values."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutators.values import dump, edit_value, load, nasty

_KNOWN = (
    *("dtype", "torch_dtype", "model_type", "architectures", "rope_scaling", "rope_parameters"),
    *("quantization_config", "compression_config", "num_nextn_predict_layers", "q_lora_rank"),
    *("n_routed_experts", "n_shared_experts", "num_hidden_layers", "first_k_dense_replace"),
    *("moe_layer_freq", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("scoring_func", "topk_method", "hidden_act", "norm_topk_prob", "rope_theta", "rms_norm_eps"),
    *("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor", "head_dim"),
    *("max_position_embeddings", "vocab_size", "hidden_size", "rope_interleave", "use_cache"),
)
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_NATIVE = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_METHODS = (
    *("fp8", "compressed-tensors", "w4afp8", "int8", "awq", "gptq", "", None, "modelopt"),
    *("quark", "bitsandbytes"),
)


def mutate(path: Path, random: Random) -> None:
    """Change one to three fields."""
    config = load(path)
    if not isinstance(config, dict):
        return
    for _ in range(random.choice((1, 1, 2, 3))):
        _change(config, random)
    dump(path, config)


def _change(config: dict[str, Any], random: Random) -> None:
    quantization = config.get("quantization_config")
    match random.randrange(8):
        case 0:
            config["rope_scaling"] = dict(_YARN)
            config["rope_scaling"][random.choice(list(_YARN))] = nasty(random)
        case 1:
            config["quantization_config"] = dict(_NATIVE)
            config["quantization_config"][random.choice(list(_NATIVE))] = nasty(random)
        case 2 if isinstance(quantization, dict):
            edit_value(quantization, random)
        case 3 if isinstance(quantization, dict):
            quantization["quant_method"] = random.choice(_METHODS)
        case 4:
            key = random.choice(_KNOWN)
            config[key] = nasty(random, config.get(key))
        case _:
            edit_value(config, random)
