"""Keys and tensors of llama.cpp's architectures, by the configs that they are of.

Sources: llama.cpp `src/models/deepseek2.cpp` and `src/models/qwen35.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]
# Matrices that llama.cpp keeps in float32.
IN_FLOAT32 = ("ffn_gate_inp.weight", "ssm_conv1d.weight")


@dataclass(frozen=True)
class Architecture:
    """Name of an architecture, its keys, and the names and shapes of its tensors, rows first as
    numpy has them, each given a config's fields."""

    name: str
    keys: Callable[[dict[str, Any]], dict[str, Any]]
    tensors: Callable[[dict[str, Any]], Shapes]


def architecture_of(config: dict[str, Any]) -> Architecture:
    """Return the architecture of a config's fields."""
    return _ARCHITECTURES[config["model_type"]]


def _usual_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"] + 1,
        "nextn_predict_layers": 1,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }


def _latent_keys(config: dict[str, Any]) -> dict[str, Any]:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    grouped = {
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }
    keys = _usual_keys(config) | (grouped if config["n_group"] > 1 else {})
    return keys | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
        "rope.freq_base": float(config["rope_theta"]),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
    }


def _latent_tensors(config: dict[str, Any]) -> Shapes:
    hidden, heads, vocab = (
        config[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    yield "token_embd.weight", (vocab, hidden)
    yield "output.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"] + 1):
        shapes = {
            "attn_norm": (hidden,),
            "attn_q_a_norm": (rank,),
            "attn_kv_a_norm": (latent,),
            "attn_q_a": (rank, hidden),
            "attn_q_b": (heads * (nope + rope), rank),
            "attn_kv_a_mqa": (latent + rope, hidden),
            "attn_k_b": (heads, latent, nope),
            "attn_v_b": (heads, value, latent),
            "attn_output": (hidden, heads * value),
            "ffn_norm": (hidden,),
        }
        if layer < config["first_k_dense_replace"]:
            shapes |= _mlp(hidden, config["intermediate_size"])
        else:
            shapes |= {
                "ffn_gate_inp": (experts, hidden),
                "ffn_gate_exps": (experts, inner, hidden),
                "ffn_up_exps": (experts, inner, hidden),
                "ffn_down_exps": (experts, hidden, inner),
                "ffn_gate_shexp": (inner, hidden),
                "ffn_up_shexp": (inner, hidden),
                "ffn_down_shexp": (hidden, inner),
            }
        if layer == config["num_hidden_layers"]:
            shapes |= _module(hidden)
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())


def _module(hidden: int) -> dict[str, tuple[int, ...]]:
    """What the MTP layer has beside that of a decoder."""
    norms = ("enorm", "hnorm", "shared_head_norm")
    return {"nextn.eh_proj": (hidden, 2 * hidden)} | {f"nextn.{name}": (hidden,) for name in norms}


def _mlp(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}


def _delta_keys(config: dict[str, Any]) -> dict[str, Any]:
    rope, head = config["rope_parameters"], config["head_dim"]
    values, value = config["linear_num_value_heads"], config["linear_value_head_dim"]
    return _usual_keys(config) | {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": int(head * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "rope.freq_base": float(rope["rope_theta"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * value,
        "full_attention_interval": config["full_attention_interval"],
    }


def _delta_tensors(config: dict[str, Any]) -> Shapes:
    hidden, vocab, head = (config[key] for key in ("hidden_size", "vocab_size", "head_dim"))
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    heads, value = config["linear_num_value_heads"], config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + heads * value
    yield "token_embd.weight", (vocab, hidden)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"] + 1):
        is_module = layer == config["num_hidden_layers"]
        shapes = {"attn_norm": (hidden,), "post_attention_norm": (hidden,)}
        shapes |= _mlp(hidden, config["intermediate_size"]) | (_module(hidden) if is_module else {})
        if is_module or (layer + 1) % config["full_attention_interval"] == 0:
            shapes |= {
                "attn_q": (2 * queries, hidden),
                "attn_k": (keys, hidden),
                "attn_v": (keys, hidden),
                "attn_output": (hidden, queries),
                "attn_q_norm": (head,),
                "attn_k_norm": (head,),
            }
        else:
            shapes |= {
                "attn_qkv": (channels, hidden),
                "attn_gate": (heads * value, hidden),
                "ssm_conv1d": (channels, config["linear_conv_kernel_dim"]),
                "ssm_beta": (heads, hidden),
                "ssm_alpha": (heads, hidden),
                "ssm_norm": (value,),
                "ssm_out": (hidden, heads * value),
            }
            yield f"blk.{layer}.ssm_dt.bias", (heads,)
            yield f"blk.{layer}.ssm_a", (heads,)
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())


_ARCHITECTURES = {
    "deepseek_v3": Architecture("deepseek2", _latent_keys, _latent_tensors),
    "glm4_moe_lite": Architecture("deepseek2", _latent_keys, _latent_tensors),
    "qwen3_5_text": Architecture("qwen35", _delta_keys, _delta_tensors),
}
