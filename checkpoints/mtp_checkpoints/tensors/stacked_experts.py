"""Experts of a layer in one tensor, as mlx-lm and Quark leave them, one by one under their released
names: their bytes lie side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mtp_checkpoints.containers.base import QUANTIZATION, ShardHeader, TensorInfo
from mtp_checkpoints.families.signs import main_layers

_MOST = 1 << 14  # experts of a layer; more are damage
_IN_MLX, _IN_TRANSFORMERS = ".switch_mlp.", (".experts.gate_up_proj", ".experts.down_proj")
_OF_MLX = re.compile(r"(.+)\.switch_mlp\.((?:gate|up|down)_proj\.[a-z]+)")
# Quark packs linears alone, and experts of transformers 5 are none.
_OF_TRANSFORMERS = re.compile(r"(model\.layers\.(\d{1,6})\..+)\.experts\.(gate_up_proj|down_proj)")
_MATRICES = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "down_proj": ("down_proj.weight",),
}


class _Stacked(NamedTuple):
    """The layer of a tensor of all its experts, and what of each lies in it, below one another."""

    layer: str
    parts: tuple[str, ...]


def with_single_experts(shard: ShardHeader, config: Mapping[str, Any]) -> ShardHeader:
    """Return a shard as if it held experts one by one; plans have it as it is."""
    of_quark = _main_layers_of_quark(config)
    if not any(_IN_MLX in one.name or one.name.endswith(_IN_TRANSFORMERS) for one in shard.tensors):
        return shard
    tensors = [
        part for one in shard.tensors for part in _one_by_one(one, _stacked(one.name, of_quark))
    ]
    if len(tensors) == len(shard.tensors):
        return shard
    return replace(shard, tensors=tuple(tensors), apart=shard.written)


def _main_layers_of_quark(config: Mapping[str, Any]) -> int:
    """Return the number of main layers of a model that Quark wrote; 0 for any other. Of MTP layers
    it writes none: they are no part of the model that it is given."""
    quantization = config.get(QUANTIZATION)
    is_quark = isinstance(quantization, dict) and quantization.get("quant_method") == "quark"
    return main_layers(config) or 0 if is_quark else 0


def _stacked(name: str, of_quark: int) -> _Stacked | None:
    if (found := _OF_MLX.fullmatch(name)) is not None:
        return _Stacked(found[1], (found[2],))
    found = _OF_TRANSFORMERS.fullmatch(name) if of_quark else None
    return _Stacked(found[1], _MATRICES[found[3]]) if found and int(found[2]) < of_quark else None


def _one_by_one(tensor: TensorInfo, stacked: _Stacked | None) -> Iterable[TensorInfo]:
    """Return the tensors of each expert; the tensor itself where it is none of [experts, rows, …]
    of whole parts."""
    if stacked is None or len(tensor.shape) < 2 or not 0 < tensor.shape[0] <= _MOST:
        return (tensor,)
    rows = tensor.shape[1]
    return (tensor,) if rows % len(stacked.parts) else _parts(tensor, stacked)


def _parts(tensor: TensorInfo, stacked: _Stacked) -> Iterator[TensorInfo]:
    (count, rows, *columns), layer = tensor.shape, stacked.layer
    names = [f"{layer}.experts.{n}.{part}" for n in range(count) for part in stacked.parts]
    shape, size = (rows // len(stacked.parts), *columns), tensor.size_bytes // len(names)
    for number, name in enumerate(names):
        start = tensor.offset_bytes + number * size
        yield tensor._replace(name=name, shape=shape, offset_bytes=start, size_bytes=size)
