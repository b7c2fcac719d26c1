"""A decoder layer's weights as compiled code takes them: addresses of panels, and their forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch

from mtp_kernels.cpu.panel_forms import PANEL
from mtp_kernels.decoder import (
    DecoderConfig,
    DeltaWeights,
    GroupedWeights,
    LatentWeights,
    LayerWeights,
    Rope,
)
from mtp_kernels.decoder.checks import check_config
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.rows import panels_of
from mtp_kernels.sizes import GroupedSizes, LatentSizes, Routing, Shapes

Layer = TypeVar("Layer")

# A layer as compiled code sees it: addresses of packed weights, 0 where there is none, then counts.
PARTS = (LatentWeights, GroupedWeights, DeltaWeights, LayerWeights)
ADDRESSES = {field.name for part in PARTS for field in fields(part)} - {"attention"}
STACKS = ("gate_up", "expert_down")  # given by the address of a table of theirs
FORMS = {f"{name}_form" for name in ADDRESSES.difference(STACKS)}  # of matrices, as in a Panel
COUNTS = (
    "routed",  # experts to pick from, 0 in a dense layer
    "shared",  # experts behind them for every row; a dense layer has one
    "inner",  # width of an expert
    "key_group",  # outputs of key_up's transpose that share the scales of its inputs, or 0
    "key_minimums",  # 1 where those of a group precede its scales, or 0
)
KEY_SCALE = "key_scale"  # address of those scales [h, groups, n], or [h, groups, 2, n]
LAYER = np.dtype([(name, np.int64) for name in (*sorted(ADDRESSES | FORMS), KEY_SCALE, *COUNTS)])


class Sizes(NamedTuple):
    """DecoderConfig as compiled code takes it; the type of attention says which code that is."""

    hidden: int
    heads: int
    kv_heads: int  # keys of a cached token
    value_at: int  # floats from a cached key to its value
    attention: LatentSizes | GroupedSizes
    routing: Routing  # its scale is float32
    has_softmax: bool  # of scores
    norm_eps: Any  # float32
    softmax_scale: Any  # float32


@dataclass(frozen=True)
class PackedLayer:
    """The arrays that own a layer's memory, and the record [1] of LAYER that points into them."""

    shapes: Shapes
    arrays: tuple[np.ndarray, ...]
    record: np.ndarray

    @property
    def inner(self) -> int:
        """The width of an expert."""
        return int(self.record["inner"][0])

    @property
    def multiplications(self) -> int:
        """Multiplications for each row, at most."""
        return sum(math.prod(shape) for shape in self.shapes.values() if shape)

    def experts_per_row(self, picked: int) -> int:
        """Return the number of experts that a row goes through, given those picked."""
        return int(self.record["shared"][0]) + picked * bool(self.record["routed"][0])


def sizes_of(config: DecoderConfig) -> Sizes:
    """Return the config's numbers in the types that compiled code computes in."""
    attention, routing = config.attention, config.routing
    kv_heads, value_at = 1, 0
    if isinstance(attention, GroupedSizes):
        kv_heads, value_at = attention.kv_heads, attention.kv_heads * attention.head
    return Sizes(
        hidden=config.hidden,
        heads=attention.heads,
        kv_heads=kv_heads,
        value_at=value_at,
        attention=attention,
        routing=routing._replace(scale=cast(Any, np.float32(routing.scale))),
        has_softmax=config.has_softmax,
        norm_eps=np.float32(config.norm_eps),
        softmax_scale=np.float32(config.softmax_scale),
    )


class PackedLayers(Generic[Layer]):
    """Some packed layers of a model, with the rotary positions that they share."""

    def __init__(self, config: DecoderConfig, layers: Sequence[Layer], rope: Rope) -> None:
        check_config(config, rope.inv_freq)
        self.config, self.layers, self._rope = config, tuple(layers), rope
        self.sizes = sizes_of(config)
        self.rotation = rope.inv_freq.contiguous().numpy(), np.float32(rope.attention_scaling)

    def __len__(self) -> int:
        return len(self.layers)

    def part(self, first: int, stop: int) -> Self:
        """Return layers [first, stop) as a decoder of their own."""
        return type(self)(self.config, self.layers[first:stop], self._rope)


def pack_layer(weights: LayerWeights, packer: Packer, absent: int = 0) -> PackedLayer:
    """Pack one layer; its own tensors may then be dropped.

    absent: routed experts that weights have not; the stacks' tables have zeros for them.
    """
    given = weights.tensors
    stacks = {
        "gate_up": packer.stack(given.pop("gate_up"), parts=2),
        "expert_down": packer.stack(given.pop("expert_down")),
    }
    made, vectors = {}, {}
    convolution = given.pop("convolution", None)
    if convolution is not None:
        vectors["convolution"] = packer.vector(convolution.t())  # [width, channels]
    key_up = given.pop("key_up", None)
    transposes = None if key_up is None else packer.transposes(key_up)
    for name, tensor in given.items():
        if tensor is None:
            continue
        exact = replace(packer, dtype=torch.float32) if name == "router" else packer
        if len(tensor.shape) > 1:
            made[name] = exact.matrix(tensor)
        else:
            vectors[name] = packer.vector(tensor)
    record = np.zeros(1, LAYER)
    if transposes is not None:
        made["key_up"], vectors[KEY_SCALE] = transposes.matrix, transposes.scales
        record["key_group"] = transposes.group
        record["key_minimums"] = transposes.minimums
    for name, matrix in made.items():
        record[name], record[f"{name}_form"] = matrix.panels.ctypes.data, matrix.form
    none = np.zeros((absent, 2), np.int64)
    tables = {name: np.concatenate([none, stack.table]) for name, stack in stacks.items()}
    for name, array in (vectors | tables).items():
        record[name] = array.ctypes.data
    routed = 0 if weights.router is None else len(weights.router)
    record["routed"], record["shared"] = routed, weights.gate_up.shape[0] + absent - routed
    record["inner"] = weights.gate_up.shape[1] // 2
    arrays = [matrix.panels for matrix in made.values()]
    for stack in stacks.values():
        arrays += stack.panels
    owned = *arrays, *vectors.values(), *tables.values()
    return PackedLayer(weights.shapes(absent), owned, record)


def inner_sizes(layers: Sequence[PackedLayer], picked: int) -> tuple[int, int]:
    """Return the most experts that a row goes through in a layer, given those picked, and the
    largest width of an expert in whole panels."""
    experts = max(layer.experts_per_row(picked) for layer in layers)
    return experts, max(panels_of(layer.inner) for layer in layers) * PANEL


def table_of(layers: Sequence[PackedLayer]) -> np.ndarray:
    """Return the layers' records [layers]."""
    return np.concatenate([layer.record for layer in layers])
