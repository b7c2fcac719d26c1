"""Checkpoints as others write them, made of the trained miniatures or of a few small tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cases import edit_json, read_json
from mtp_checkpoints.families import family_of
from mtp_checkpoints.quantization.method import modules_of
from mtp_checkpoints.quantization.methods import METHODS as METHODS_READ
from mtp_checkpoints.quantization.native import method_of, quantization_of, with_quantization
from quantized_by_others import read_all, write

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
GLM, DEEPSEEK = FIXTURES / "glm4-moe-tiny", FIXTURES / "deepseek-v3-tiny"
GLM_MTP = "model.layers.3."  # of the miniature
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
INDEX = "model.safetensors.index.json"


def as_is(content: Any) -> None:
    """No change."""


def rewritten(
    source: Path,
    folder: Path,
    tensors: Callable[[Tensors], Tensors | None] = as_is,
    config: Callable[[Config], object] = as_is,
) -> Path:
    """A copy of a checkpoint in one file, its tensors and config.json changed."""
    stored: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        stored |= load_file(path)
    changed = tensors(stored)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, folder)
    fields = read_json(folder / "config.json")
    config(fields)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(stored if changed is None else changed, folder / "model.safetensors")
    return folder


def without(*prefixes: str) -> Callable[[Tensors], Tensors]:
    """A change that takes out the tensors whose names begin so."""
    return lambda stored: {
        name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)
    }


def headers(
    folder: Path, config: Config, names: Mapping[str, torch.dtype | None], **files: str
) -> Path:
    """A checkpoint of tiny tensors by names, bf16 where no dtype is given, of any model; files are
    others by their names without endings."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: torch.ones(2, 2).to(dtype or torch.bfloat16) for name, dtype in names.items()}
    save_file(stored, folder / "model.safetensors")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def quantized(
    source: Path, folder: Path, method: str, config: Callable[[Config], object] = as_is
) -> Path:
    """A checkpoint whose main model others quantized, with the MTP layer as it was beside it."""
    fields = read_json(source / "config.json")
    write(source, folder, method)
    layer = f"model.layers.{fields['num_hidden_layers']}."
    mtp = {name: tensor for name, tensor in read_all(source).items() if name.startswith(layer)}
    save_file(mtp, folder / "model-mtp.safetensors")
    edit_json(
        folder / INDEX,
        lambda index: index["weight_map"].update(dict.fromkeys(mtp, "model-mtp.safetensors")),
    )
    edit_json(folder / "config.json", lambda own: own.update(num_nextn_predict_layers=1))
    edit_json(folder / "config.json", config)
    return folder


def mtp_left_out(fields: Config) -> None:
    """A quantization_config that leaves the MTP layer out, as the tool that wrote it could."""
    quantization = quantization_of(fields)
    method = METHODS_READ[method_of(quantization)]
    assert method.leave_out is not None
    left_out = [f"model.layers.{fields['num_hidden_layers']}"]
    if method.whole_names:
        specs = family_of(fields).tensors.values()
        left_out = modules_of(s for s in specs if s.is_linear_weight and s.mtp_layer is not None)
    fields |= with_quantization(fields, method.leave_out(quantization, left_out))
