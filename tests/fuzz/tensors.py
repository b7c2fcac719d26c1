"""Tensors of a folder as safetensors' own reader gives them, and what an export makes of them.

Names and operations are written out here, not derived from the code under test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, deserialize

from fuzz.sandbox import Finding

OWN_PREFIX = "mtp."  # of the MTP layer of families that do not put it behind the main layers
_TILE = 128
_MTP_LEVEL = ("embed_tokens", "shared_head", "enorm", "hnorm", "eh_proj")
_PADDLE = {
    "embed_tokens.weight": "deepseek_v3_mtp.embed_tokens.weight",
    "shared_head.norm.weight": "deepseek_v3_mtp.norm.weight",
    "shared_head.head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Stored:
    """One tensor: dtype, shape and bytes, as on disk."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Stored]


def read_tensors(folder: Path) -> Tensors:
    """Return the tensors of all shards of a folder; a Finding where the reader refuses one."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        shard = read_shard(path)
        if twice := tensors.keys() & shard.keys():
            raise Finding("wrong bytes", "a tensor in two shards", f"{path}: {sorted(twice)[0]}")
        tensors |= shard
    return tensors


def read_shard(path: Path) -> Tensors:
    """Return the tensors of one shard; a Finding where the reader refuses it."""
    try:
        entries = deserialize(path.read_bytes())
    except SafetensorError as error:
        raise Finding("wrong bytes", "safetensors refuses a shard", f"{path}: {error}") from None
    return {
        name: Stored(facts["dtype"], tuple(facts["shape"]), bytes(facts["data"]))
        for name, facts in entries
    }


def check_equal(found: Tensors, expected: Tensors, where: str) -> None:
    """Raise a Finding unless two sets of tensors are the same in every byte."""
    names = sorted(found.keys() ^ expected.keys())
    if names:
        raise Finding("wrong bytes", f"{where}: other tensors", ", ".join(names[:10]))
    wrong = [name for name in sorted(found) if found[name] != expected[name]]
    if wrong:
        one, other = found[wrong[0]], expected[wrong[0]]
        details = f"{', '.join(wrong[:10])}\nfound {one.dtype} {one.shape}, expected {other.dtype}"
        raise Finding("wrong bytes", f"{where}: other values", f"{details} {other.shape}")


def expected_main(source: Tensors, config: dict[str, Any]) -> Tensors:
    """Return the main part: all but the MTP layer, as it is stored."""
    return {n: t for n, t in source.items() if not n.startswith(_prefix(config))}


def expected_mtp(source: Tensors, config: dict[str, Any], target: str) -> Tensors:
    """Return the MTP part in a target's layout, embedding and head included where it has some."""
    prefix = _prefix(config)
    if prefix == OWN_PREFIX:
        return {n: t for n, t in source.items() if n.startswith(prefix)}
    layer = int(config["num_hidden_layers"])
    own = {
        "embed_tokens.weight": source["model.embed_tokens.weight"],
        "shared_head.head.weight": source["lm_head.weight"],
    }
    own |= {n.removeprefix(prefix): t for n, t in source.items() if n.startswith(prefix)}
    if target == "xllm":
        own = {n: _dequantized(t, own.get(f"{n}_scale_inv")) for n, t in own.items()
               if not n.endswith("_scale_inv")}  # fmt: skip
    if target == "paddlenlp":
        own = {n: t if n == "embed_tokens.weight" else _transposed(t) for n, t in own.items()}
    return {_name(n, layer, target): tensor for n, tensor in own.items()}


def _prefix(config: dict[str, Any]) -> str:
    """Return what names of the MTP layer's tensors begin with."""
    if str(config.get("model_type")).startswith("qwen"):
        return OWN_PREFIX
    return f"model.layers.{int(config['num_hidden_layers'])}."


def _name(name: str, layer: int, target: str) -> str:
    at_model = name.split(".")[0] in _MTP_LEVEL
    match target:
        case "hf":
            return f"model.layers.{layer}.{name}"
        case "lightllm":
            return f"model.layers.0.{name}"
        case "xllm":
            return f"model.{name}" if at_model else f"model.layers.0.{name}"
        case "paddlenlp":
            inner = name if at_model else f"layers.0.{name}"
            return _PADDLE.get(name, f"deepseek_v3_mtp.{inner}")
    raise AssertionError(target)


def _transposed(tensor: Stored) -> Stored:
    if len(tensor.shape) != 2:
        return tensor
    rows, columns = tensor.shape
    item_bytes = len(tensor.data) // max(1, rows * columns)
    values = np.frombuffer(tensor.data, f"V{item_bytes}").reshape(rows, columns)
    return Stored(tensor.dtype, (columns, rows), values.T.copy().tobytes())


def _dequantized(tensor: Stored, scale: Stored | None) -> Stored:
    """Return an fp8 weight in bf16, tile by tile: fp32 product, one rounding."""
    if scale is None:
        return tensor
    codes = torch.frombuffer(bytearray(tensor.data), dtype=torch.float8_e4m3fn).float()
    codes = codes.view(tensor.shape)
    scales = torch.frombuffer(bytearray(scale.data), dtype=torch.float32).view(scale.shape)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            tile = (
                slice(row * _TILE, (row + 1) * _TILE),
                slice(column * _TILE, (column + 1) * _TILE),
            )
            codes[tile] *= scales[row, column]
    data = codes.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return Stored("BF16", tensor.shape, data)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that the program accepted or wrote."""
    value = json.loads(path.read_bytes())
    assert isinstance(value, dict), path
    return value
