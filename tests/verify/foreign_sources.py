"""Checkpoints of the trained miniatures in memory, as they are and as others quantize them.

checkpoint = quantized(GLM, "awq", mtp="unquantized")
checkpoint.save(folder)
"""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from quantized_by_others import LINEAR, METHODS, Tensors, read_all, unquantized, write

FIXTURES = Path(__file__).parents[2] / "fixtures"
GLM = FIXTURES / "glm4-moe-tiny"
DEEPSEEK = FIXTURES / "deepseek-v3-tiny"
INDEX = "model.safetensors.index.json"
LISTS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")

Change = Callable[[Tensors], Tensors]


@dataclass
class Checkpoint:
    """Tensors in the order in which they are sharded, and what lies beside them.

    own_file: the MTP layer's tensors go there instead, in the index. config_file: the quantization
    config of a method that has a file of its own.
    """

    source: Path
    config: dict[str, Any]
    tensors: Tensors
    shards: int = 2
    own_file: str = ""
    config_file: tuple[str, dict[str, Any]] | None = None

    @property
    def layer(self) -> str:
        """Prefix of the MTP layer's tensors."""
        return f"model.layers.{self.config['num_hidden_layers']}."

    def mtp(self) -> Tensors:
        return {name: one for name, one in self.tensors.items() if name.startswith(self.layer)}

    def replace(self, change: Change) -> None:
        """Change the MTP layer: what `change` returns takes its place."""
        main = {name: one for name, one in self.tensors.items() if not name.startswith(self.layer)}
        self.tensors = main | change(self.mtp())

    def of(self, last: str) -> torch.Tensor:
        return self.tensors[self.layer + last]

    def set(self, last: str, tensor: torch.Tensor) -> None:
        self.tensors[self.layer + last] = tensor

    @property
    def quantization(self) -> dict[str, Any]:
        if self.config_file is not None:
            found: dict[str, Any] = self.config_file[1]["quantization"]
            return found
        quantization: dict[str, Any] = self.config["quantization_config"]
        return quantization

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.config_file is not None:
            (folder / self.config_file[0]).write_text(json.dumps(self.config_file[1]))
        for path in (*self.source.glob("tokenizer*"), *self.source.glob("generation_config.json")):
            shutil.copy(path, folder)
        files = self._files()
        weight_map = {name: file for file, names in files.items() for name in names}
        for file, names in files.items():
            stored = {name: self.tensors[name].contiguous().clone() for name in names}
            save_file(stored, folder / file, metadata={"format": "pt"})
        if len(files) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index))

    def _files(self) -> dict[str, list[str]]:
        own = list(self.mtp()) if self.own_file else []
        names = [name for name in self.tensors if name not in own]
        files = {self.own_file: own} if own else {}
        if self.shards == 1 and not own:
            return {"model.safetensors": names}
        length = -(-len(names) // self.shards)
        for number in range(self.shards):
            file = f"model-{number + 1:05d}-of-{self.shards:05d}.safetensors"
            files[file] = names[number * length : (number + 1) * length]
        return files


def released(source: Path) -> Checkpoint:
    """The miniature as it is."""
    return Checkpoint(source, copy.deepcopy(_config(source)), dict(_read(source)))


def shortened(source: Path, layers: int) -> Checkpoint:
    """The miniature with its first main layers alone, and its MTP layer: files and weights are
    sound, though nothing it writes is."""
    found = released(source)
    whole, kept = found.layer, f"model.layers.{layers}."
    main = re.compile(r"model\.layers\.(\d+)\.")
    found.config["num_hidden_layers"] = layers
    found.tensors = {
        name.replace(whole, kept): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(whole) or not (own := main.match(name)) or int(own[1]) < layers
    }
    return found


def quantized(
    source: Path, method: str, mtp: Literal["lost", "unquantized", "quantized"]
) -> Checkpoint:
    """The miniature in one of METHODS, with its MTP layer, which its config announces.

    Nothing tells engines that an unquantized layer is one: see `ignore`.
    """
    config, tensors = _quantized(source, method)
    found = Checkpoint(source, copy.deepcopy(config), dict(tensors))
    found.config["num_nextn_predict_layers"] = 1
    how = METHODS[method]
    if how.file is not None:
        found.config_file = (how.file, copy.deepcopy(how.config))
    if mtp == "lost":
        return found
    original = Checkpoint(source, config, dict(unquantized(_read(source))))
    for name, tensor in original.mtp().items():
        if mtp == "quantized" and LINEAR.match(name) and re.match(how.covers, name):
            module = name.removesuffix(".weight")
            parts, _ = how.encode(tensor.float())
            found.tensors |= {f"{module}.{last}": part for last, part in parts.items()}
        else:
            keeps = tensor.dtype is torch.float32 and tensor.dim() == 1
            found.tensors[name] = tensor if keeps else tensor.to(how.dtype)
    return found


def modules(checkpoint: Checkpoint) -> list[str]:
    """The MTP layer's linears by their full names, as llm-compressor lists them."""
    return sorted(name.removesuffix(".weight") for name in checkpoint.mtp() if LINEAR.match(name))


def ignore(checkpoint: Checkpoint, *entries: str) -> Checkpoint:
    """Add entries to the list of what is not quantized, in the way of its method."""
    quantization = checkpoint.quantization
    match quantization.get("quant_method", "modelopt"):
        case "gptq":
            dynamic = quantization.setdefault("dynamic", {})
            quantization["dynamic"] = {**dynamic, **{f"-:{entry}": {} for entry in entries}}
        case "auto-round":
            kept = {"bits": 16, "data_type": "float"}
            extra = quantization.setdefault("extra_config", {})
            quantization["extra_config"] = {**extra, **dict.fromkeys(entries, kept)}
        case method:
            field = next((name for name in LISTS if name in quantization), "ignored_layers")
            field = "modules_to_not_convert" if method == "awq" else field
            quantization[field] = [*(quantization.get(field) or []), *entries]
    return checkpoint


@functools.cache
def _config(source: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((source / "config.json").read_text())
    return found


@functools.cache
def _read(source: Path) -> Tensors:
    return read_all(source)


@functools.cache
def _quantized(source: Path, method: str) -> tuple[dict[str, Any], Tensors]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "main"
        write(source, folder, method)
        return json.loads((folder / "config.json").read_text()), read_all(folder)
