"""The trained Qwen3.5 fixture with heads of the gated delta net as wide as in real checkpoints:
what vLLM's kernels for CPUs want. They are widened by zeros; only a norm's epsilon weighs more, so
that a token here and there is another one than the fixture's."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from engine_runs import DELTA_FIXTURE, write_shard

from cases import edit_json, read_json, read_tensors

WIDTH = 128
_WIDTHS = ("linear_key_head_dim", "linear_value_head_dim")


def write_wide_heads(folder: Path) -> Path:
    """Queries are divided by the root of a head's width, and the norm takes a mean over more
    values, of which the rest is zero: four times as wide, it would return twice as much."""
    shutil.copytree(DELTA_FIXTURE, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    (width,) = {read_json(folder / "config.json")[name] for name in _WIDTHS}
    edit_json(folder / "config.json", lambda config: config.update(dict.fromkeys(_WIDTHS, WIDTH)))
    tensors = read_tensors(DELTA_FIXTURE)
    for name, tensor in tensors.items():
        if name.endswith("linear_attn.norm.weight"):
            tensors[name] = _widened(tensor * (width / WIDTH) ** 0.5, width)
        elif name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")):
            tensors[name] = _widened(tensor, width)
        elif name.endswith("linear_attn.out_proj.weight"):
            tensors[name] = _widened(tensor.T, width).T
    write_shard(folder, tensors)
    return folder


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros behind the rows of each head."""
    heads = tensor.unflatten(0, (-1, width))
    result = heads.new_zeros(len(heads), WIDTH, *tensor.shape[1:])
    result[:, :width] = heads
    return result.flatten(0, 1)
