"""llama.cpp as a peer: files of the same shapes with random weights, and its own benchmarks.

Sources: llama.cpp `src/models/deepseek2.cpp` (keys and tensors), `ggml/src/ggml-common.h` (blocks).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
_POOL_BLOCKS = 1 << 21  # of random weights, of which every matrix has some
_SCALES = {"Q4_0": 0.005, "Q8_0": 0.0003, "Q6_K": 0.00003}
_SCALE_AT = {"Q6_K": 208}  # byte of a block's float16 scale; others begin with it


def write_gguf(path: Path, config: dict[str, Any], kind: str) -> Path:
    """Write the main layers of a config of multi-head latent attention, with every matrix in one
    kind of blocks, but the head in Q6_K beside Q4_0, as llama-quantize has it."""
    import gguf

    writer = gguf.GGUFWriter(path, "deepseek2")
    for key, value in _keys(config).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_bool if isinstance(value, bool) else add)(f"deepseek2.{key}", value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    pools = {name: _blocks(name) for name in (kind, "Q6_K")}
    at = 0
    for name, shape in _tensors(config):
        if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
            values = np.random.default_rng(len(name)).standard_normal(shape) * shape[-1] ** -0.5
            writer.add_tensor(name, (values if len(shape) > 1 else 1 + 0 * values).astype("f4"))
            continue
        own = "Q6_K" if kind == "Q4_0" and name == "output.weight" else kind
        width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[own]]
        count = prod(shape) // width
        pool, at = pools[own], (at + 4093) % 65536
        repeats = -(-(at + count) // len(pool))
        blocks = (np.concatenate([pool] * repeats) if repeats > 1 else pool)[at : at + count]
        data = blocks.reshape(*shape[:-1], shape[-1] // width * size)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks(kind: str) -> np.ndarray[Any, Any]:
    """Random blocks of a kind [blocks, bytes], each with the same scale."""
    import gguf

    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(0).integers(0, 256, (_POOL_BLOCKS, size), dtype=np.uint8)
    at = _SCALE_AT.get(kind, 0)
    blocks[:, at : at + 2] = np.array([_SCALES[kind]], "f2").view(np.uint8)
    return blocks


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
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


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes, rows first as numpy has them."""
    hidden, heads, vocab = (
        config[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    yield "token_embd.weight", (vocab, hidden)
    yield "output.weight", (vocab, hidden)
    yield "output_norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        dense = layer < config["first_k_dense_replace"]
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
        if dense:
            width = config["intermediate_size"]
            shapes |= {"ffn_gate": (width, hidden), "ffn_up": (width, hidden)}
            shapes["ffn_down"] = (hidden, width)
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
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())


def speeds(programs: Path, model: Path, prompt: int, tokens: int, batches: tuple[int, ...]) -> Any:
    """Return tokens per second of a prompt, and of decoding at every batch, by llama.cpp's own
    llama-batched-bench in a folder of programs."""
    command = [programs / "llama-batched-bench", "-m", model, "-t", THREADS, "-c", 8192]
    command += ["--output-format", "jsonl"]
    prompts = _lines([*command, "-npp", prompt, "-ntg", 1, "-npl", 1])
    decodes = _lines([*command, "-npp", 4, "-ntg", tokens, "-npl", ",".join(map(str, batches))])
    return {
        "prompt": max(line["speed_pp"] for line in prompts),
        "decode": {str(line["pl"]): line["speed_tg"] for line in decodes},
    }


def _lines(command: list[Any]) -> list[dict[str, Any]]:
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
