"""GGUF files of released checkpoints as llama.cpp's converter writes them, whole or in parts, sound
or changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF
from mtp_checkpoints.containers.gguf_architectures.base import ARCHITECTURE, HALVES, Change
from mtp_checkpoints.containers.gguf_file import file_layout, split_name
from mtp_checkpoints.containers.gguf_values import Keys, Value, i32, u16, u32
from mtp_checkpoints.containers.gguf_vocabulary import vocabulary_keys
from mtp_checkpoints.dtypes import DType, OutputTensor, dtype_name
from mtp_checkpoints.formats import FORMATS, FormatOptions
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import weights_on_disk

LATENT_UP = "self_attn.kv_b_proj"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to be written; its values are fp32, of blocks the bytes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    values: torch.Tensor

    @property
    def output(self) -> OutputTensor:
        return OutputTensor(self.name, self.dtype, self.shape)


@dataclass(frozen=True)
class GgufModel:
    """Keys and tensors of a model, which a test may change before it writes them."""

    keys: dict[str, Value]
    tensors: dict[str, GgufTensor] = field(default_factory=dict)

    def only(self, keep: Callable[[str], bool]) -> GgufModel:
        return GgufModel(self.keys, {n: t for n, t in self.tensors.items() if keep(n)})

    def write(self, path: Path, keys: Keys | None = None) -> Path:
        tensors = [tensor.output for tensor in self.tensors.values()]
        layout = file_layout({**self.keys, **(keys or {})}, tensors)
        data = bytearray(layout.size_bytes)
        data[: len(layout.head)] = layout.head
        for name, place in layout.places.items():
            values = self.tensors[name].values.contiguous().reshape(-1)
            data[place.start : place.stop] = values.view(torch.uint8).numpy().tobytes()
        path.write_bytes(data)
        return path

    def write_parts(self, folder: Path, name: str, count: int) -> list[Path]:
        """Write the model as files of a few tensors each; the keys are in the first."""
        names, paths = [*self.tensors], []
        step = -(-len(names) // count)
        for number in range(count):
            own = names[number * step : (number + 1) * step]
            split = {
                "split.no": u16(number),
                "split.count": u16(count),
                "split.tensors.count": i32(len(names)),
            }
            part = GgufModel(self.keys if number == 0 else {}, {n: self.tensors[n] for n in own})
            paths.append(part.write(folder / split_name(name, number + 1, count), split))
        return paths


def gguf_model(source: Path, kind: str | None = None, *, modules: int = 1) -> GgufModel:
    """A released checkpoint as one model; kind: the blocks of its matrices, None for bfloat16."""
    checkpoint = Checkpoint.open(source)
    stored = stored_model(checkpoint.config, checkpoint.tensors)
    architecture = ARCHITECTURE_OF[checkpoint.config["model_type"]]
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for weight in weights_on_disk(stored, checkpoint.tensors):
        values = weight.encoded(0, weight.rows).dequantize()
        for name, own in _halves(weight.stored.weight.name, values, checkpoint.config):
            place = architecture.place(name)
            assert place is not None
            assert place.expert in (None, len(parts[place.name]))
            parts[place.name].append(own)
    files, config = checkpoint.files, checkpoint.config
    words = vocabulary_keys(files, config, config["vocab_size"], "gpt-2")
    keys = {**architecture.keys(stored.family, modules), **words}
    tensors = (
        _tensor(name, own[0] if len(own) == 1 else torch.stack(own), kind)
        for name, own in parts.items()
    )
    return GgufModel(keys, {tensor.name: tensor for tensor in tensors})


def _halves(
    name: str, values: torch.Tensor, config: dict[str, Any]
) -> Sequence[tuple[str, torch.Tensor]]:
    if LATENT_UP not in name:
        return [(name, values)]
    nope, size = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = values.view(-1, nope + size, values.shape[1])
    keys, wanted = heads.split([nope, size], dim=1)
    halves = {Change.KEYS: keys.transpose(1, 2), Change.VALUES: wanted}
    return [(name.replace(LATENT_UP, HALVES[half]), own) for half, own in halves.items()]


def _tensor(name: str, values: torch.Tensor, kind: str | None) -> GgufTensor:
    shape = tuple(values.shape)
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return GgufTensor(name, DType.F32, shape, values.contiguous())
    if kind is None or shape[-1] % FORMATS[kind].of_options(FormatOptions()).k_divisor:
        values = values.bfloat16()
        return GgufTensor(name, dtype_name(values.dtype), shape, values)
    form = FORMATS[kind].of_options(FormatOptions())
    (blocks,), _ = form.quantize(values.reshape(-1, shape[-1]).contiguous(), "minmax")
    return GgufTensor(name, form.tensors(name, shape)[0].dtype, shape, blocks)


def is_of_module(model: GgufModel) -> Callable[[str], bool]:
    """Return whether a tensor is of the module, by its name."""
    return lambda name: name.startswith(f"blk.{_main_layers(model)}.")


def without_module(model: GgufModel) -> GgufModel:
    """Return the main model alone, and keys that count no module."""
    counted = {"block_count": u32(_main_layers(model)), "nextn_predict_layers": u32(0)}
    family, of_module = str(model.keys[ARCHITECTURE].data), is_of_module(model)
    keys = {f"{family}.{name}": value for name, value in counted.items()}
    return GgufModel(model.keys | keys, model.only(lambda name: not of_module(name)).tensors)


def _main_layers(model: GgufModel) -> int:
    return int(str(model.keys[f"{model.keys[ARCHITECTURE].data}.block_count"].data)) - 1
