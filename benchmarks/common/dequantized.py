"""A native fp8 checkpoint as float32, for engines that cannot read fp8 on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_dequantized(source: Path, folder: Path) -> Path:
    """Write the source's tensors dequantized to float32; the config loses its quantization."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale = tensors.pop(name).float()
        weight = tensors[name.removesuffix("_scale_inv")].float()
        rows, columns = weight.shape
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        tensors[name.removesuffix("_scale_inv")] = weight * spread
    tensors = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    config["torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
