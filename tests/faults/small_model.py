"""A small model with weights spread like trained ones, and its bundles in every row of the
precision table: what is visible in files and weights needs no trained model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.make_checkpoint import write_tokenizer
from cases import edit_json, export, quantize, read_json, read_tensors
from mtp_checkpoints.families import family_of
from runtime.checkpoints import SMALL, SMALL_CONFIGS, YARN, changed, text_part, write_checkpoint

CONFIG: dict[str, Any] = SMALL | {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "torch_dtype": "bfloat16",
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "rope_scaling": YARN,
}
MTP = f"model.layers.{CONFIG['num_hidden_layers']}"
_GGUF = ("q4_0", "q8_0", "--target", "llama.cpp", "--pre-tokenizer", "none")
ROWS: dict[str, tuple[str, ...]] = {
    "fp8": ("a8w8_fp8", "a8w8_fp8"),
    "int8": ("weight_only_int8", "weight_only_int8"),
    "int4": ("weight_only_int4", "weight_only_int8", "--group-size", "64"),
    "int4 everywhere": (
        *("weight_only_int4", "weight_only_int8", "--int4-scope", "all", "--group-size", "32"),
        *("--scale", "mse"),
    ),
    "wint4": ("a8w8_fp8_wint4", "a8w8_fp8"),
    "wint4 for SGLang": ("a8w8_fp8_wint4", "a8w8_fp8", "--target", "sglang"),
    "w4afp8": ("a8w8_fp8_wint4", "a8w8_fp8", "--format", "w4afp8", "--target", "sglang"),
    "nvfp4": ("weight_only_nvfp4", "weight_only_nvfp4"),
    "nvfp4 inputs": ("a4w4_nvfp4", "a4w4_nvfp4"),
    "modelopt": ("a4w4_nvfp4", "bf16", "--format", "modelopt"),
    "mxfp4": ("weight_only_mxfp4", "weight_only_mxfp4"),
    "mxfp8": ("a8w8_mxfp8", "a8w8_mxfp8"),
    "bf16": ("bf16", "bf16"),
    "int8 head": (
        *("weight_only_int4", "weight_only_int8", "--group-size", "64"),
        *("--head-quant", "weight_only_int8"),
    ),
    "GGUF": (*_GGUF, "--tensor-type", "ffn_down=q5_1"),
    "GGUF in one": (*_GGUF, "--part", "one"),
}
TARGETS = ("lightllm", "xllm", "paddlenlp", "eagle")
CHANNELS = "glm4_moe in fp8 channels"
_INDEX = "model.safetensors.index.json"
_FP8_CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
                "group_size": None,
                "block_structure": None,
                "actorder": None,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
}


def family_config(model_type: str) -> dict[str, Any]:
    """A config of another family whose checkpoint write_dense can write."""
    changes = {"vocab_size": CONFIG["vocab_size"], "torch_dtype": "bfloat16"}
    return changed(SMALL_CONFIGS[model_type], **changes)


def write_dense(
    folder: Path, seed: int = 0, config: dict[str, Any] = CONFIG, names: Collection[str] = ()
) -> Path:
    """The model in bf16 in two shards, with a tokenizer; names as for write_checkpoint."""
    write_checkpoint(folder, config, seed, names)
    single = folder / "model.safetensors"
    tensors = {
        name: tensor if name.endswith(("e_score_correction_bias", "tid2eid")) else tensor.bfloat16()
        for name, tensor in load_file(single).items()
    }
    single.unlink()
    places: dict[str, str] = {}
    for number in (1, 2):
        shard = f"model-{number:05}-of-00002.safetensors"
        own = {name: t for name, t in tensors.items() if _in_first_shard(name) == (number == 1)}
        save_file(own, folder / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(own, shard)
    (folder / _INDEX).write_text(json.dumps({"weight_map": places}))
    write_tokenizer(folder, text_part(config)["vocab_size"])
    return folder


def _in_first_shard(name: str) -> bool:
    return re.match(r"(?!.*\bmtp\.)([a-z_]+\.)*layers\.[0-3]\.", name) is not None


def in_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, computed here and not by the code under test."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale.bfloat16()


def write_channels(dense: Path, folder: Path) -> Path:
    """A model in fp8 channels as GLM's releases have them: its MTP layer, with a copy of the head
    in fp8 too, in mtp.safetensors beside the index."""
    config = read_json(dense / "config.json")
    family, layer = family_of(config), f"model.layers.{config['num_hidden_layers']}"
    head = f"{layer}.shared_head.head.weight"
    unquantized = ["lm_head", "model.embed_tokens", f"{layer}.eh_proj", "re:.*mlp.gate$"]
    quantization = _FP8_CHANNELS | {"ignore": unquantized}
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=quantization))
    parts: dict[str, dict[str, torch.Tensor]] = {"model.safetensors": {}, "mtp.safetensors": {}}
    tensors = read_tensors(dense)
    tensors[head] = tensors["lm_head.weight"]
    for name, tensor in tensors.items():
        part = parts["mtp.safetensors" if name.startswith(layer) else "model.safetensors"]
        part[name] = tensor
        if family.tensors[name].is_linear_weight or name == head:
            part[name], part[f"{name}_scale"] = in_channels(tensor)
    for file, part in parts.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = dict.fromkeys(parts["model.safetensors"], "model.safetensors")
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_fp8(dense: Path, folder: Path) -> Path:
    """The same in native fp8, as a bundle: the source of other bundles."""
    return write_row(dense, folder, "fp8")


def write_row(source: Path, folder: Path, row: str) -> Path:
    """A bundle in a row of the precision table."""
    base, mtp, *more = ROWS[row]
    outcome = quantize(
        source, folder, "--base-quant", base, "--mtp-quant", mtp, "--link", "copy", *more
    )
    assert outcome.code == 0, outcome.err
    return folder


def write_target(source: Path, folder: Path, target: str) -> Path:
    """A bundle whose draft is for a target engine."""
    outcome = export(source, folder, "--link", "copy", "--target", target)
    assert outcome.code == 0, outcome.err
    return folder
