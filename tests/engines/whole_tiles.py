"""The trained fixture with every fp8 linear of whole tiles, as in real checkpoints: what vLLM's fp8
kernels for CPUs want. It is widened by zeros, so it decodes as the fixture does."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from engine_runs import FIXTURE, write_shard

from cases import edit_json, read_tensors

TILE = 128
WIDENED = {"q_lora_rank": TILE, "moe_intermediate_size": TILE}


def write_whole_tiles(folder: Path) -> Path:
    """A tile that was partly there stays one tile, so that no scale changes."""
    shutil.copytree(FIXTURE, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    edit_json(folder / "config.json", lambda config: config.update(WIDENED))
    tensors = read_tensors(FIXTURE)
    for name, tensor in tensors.items():
        if name.endswith("q_a_layernorm.weight"):  # a mean over more, of which the rest is zero
            tensors[name] = _padded(tensor * (len(tensor) / TILE) ** 0.5, (TILE,))
        elif "experts." in name or name.endswith(("q_a_proj.weight", "q_b_proj.weight")):
            shape = tensor.shape if name.endswith("_inv") else [max(n, TILE) for n in tensor.shape]
            tensors[name] = _padded(tensor, shape)
    write_shard(folder, tensors)
    return folder


def _padded(tensor: torch.Tensor, shape: torch.Size | list[int] | tuple[int, ...]) -> torch.Tensor:
    """Zeros behind what is there; torch.zeros has no fp8."""
    stored = torch.uint8 if tensor.itemsize == 1 else tensor.dtype
    result = torch.zeros(*shape, dtype=stored)
    result[tuple(slice(n) for n in tensor.shape)] = tensor.view(stored)
    return result.view(tensor.dtype)
