"""Layers of a split model, as rank 0 calls them: the other ranks run their parts beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.decoder import Projection, RowStep
from mtp_runtime.cache import Cache, CacheSpec
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.led import Handle, LedLinear
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.models.model import Execution, Layers, RecursiveModule
from mtp_runtime.parallel.group import Group


class LedExecution:
    """Execution of a split model: layers and heads on every rank, all else on rank 0 alone."""

    def __init__(self, inner: Execution, group: Group) -> None:
        self._inner, self._handle = inner, Handle(group, inner)

    def layers(self, layers: Iterable[DecoderLayer]) -> Layers:
        """Run layers, which every rank has a part of."""
        own = self._inner.layers(layers)
        return LedLayers(Handle(self._handle.group, own), own, (0, len(own)))

    def norm(self, norm: RmsNorm) -> RowStep:
        return self._inner.norm(norm)

    def linear(self, linear: Linear) -> Projection:
        if isinstance(linear, LedLinear):
            return linear.run_by(self._handle)
        return self._inner.linear(linear)

    def recursion(self, module: RecursiveModule) -> None:
        """Draft step by step: the ranks meet between layers."""
        return None


def on_ranks(execution: Execution, group: Group) -> Execution:
    """Return the execution of a model that a group divides, given that of each rank's part."""
    return execution if group.is_one else LedExecution(execution, group)


@dataclass(frozen=True)
class LedLayers:
    """Layers [first, stop) of some that every rank has a part of; own is rank 0's part of them."""

    handle: Handle
    own: Layers
    span: tuple[int, int]

    def __len__(self) -> int:
        return self.span[1] - self.span[0]

    def new_cache(self, spec: CacheSpec) -> Cache:
        return self.handle.group.everywhere(_new_cache, self.handle.number, self.span, spec)

    def __call__(
        self,
        x: torch.Tensor,
        cache: Cache,
        layout: BatchLayout,
        attention_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, LedCache), "the cache that new_cache made"
        numbers = self.handle.number, cache.handle.number
        return self.handle.group.everywhere(
            _run, numbers, self.span, ToldLayout(layout), x, attention_input
        )

    def each(self) -> Iterator[Layers]:
        return (self.part(at, at + 1) for at in range(len(self)))

    def part(self, first: int, stop: int) -> LedLayers:
        start = self.span[0]
        return replace(self, own=self.own.part(first, stop), span=(start + first, start + stop))


@dataclass(frozen=True)
class LedCache:
    """Rank 0's part of a cache that every rank has its own of."""

    handle: Handle
    own: Cache

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return self.own.tensors


def own_part(layers: Layers) -> Layers:
    """Return rank 0's part of layers that all ranks run; others as they are."""
    return layers.own if isinstance(layers, LedLayers) else layers


class ToldLayout:
    """A layout that reaches the other ranks with its arrays in main memory."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = {name: tensor.cpu().numpy() for name, tensor in _tensors_of(self._layout)}
        return _layout_of, (arrays, self._layout.max_q_len)

    def on(self, device: torch.device) -> BatchLayout:
        """Return the layout on a device."""
        layout = self._layout
        if layout.positions.device == device:
            return layout
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in _tensors_of(layout)}
        return replace(layout, **moved)


def _tensors_of(layout: BatchLayout) -> list[tuple[str, torch.Tensor]]:
    found = ((field.name, getattr(layout, field.name)) for field in fields(layout))
    return [(name, value) for name, value in found if isinstance(value, torch.Tensor)]


def _layout_of(arrays: dict[str, Any], max_q_len: int | None) -> ToldLayout:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ToldLayout(BatchLayout(**tensors, max_q_len=max_q_len))


def _layers(group: Group, number: int, span: tuple[int, int]) -> Layers:
    own: Layers = group.parts[number]
    return own if span == (0, len(own)) else own.part(*span)


def _new_cache(group: Group, number: int, span: tuple[int, int], spec: CacheSpec) -> LedCache:
    device = torch.device(group.device(spec.device.type))
    own = _layers(group, number, span).new_cache(replace(spec, device=device))
    return LedCache(Handle(group, own), own)


def _run(
    group: Group,
    numbers: tuple[int, int],
    span: tuple[int, int],
    layout: ToldLayout,
    x: torch.Tensor,
    attention_input: torch.Tensor | None,
) -> torch.Tensor:
    cache: Cache = group.parts[numbers[1]]
    return _layers(group, numbers[0], span)(x, cache, layout.on(x.device), attention_input)
