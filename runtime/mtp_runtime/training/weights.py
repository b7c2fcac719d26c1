"""Weights of a draft as parameters of a training: whole, or as low-rank changes of what is stored.

Every step computes with the values that the stored format can hold, and the gradient passes the
rounding unchanged, so that writing a trained draft costs it nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.formats import UNQUANTIZED, EncodedWeight, WeightFormat
from mtp_runtime.loading.weight_source import WeightSource

DOWN, UP = ".lora_down", ".lora_up"
_FROZEN_ROLES = (Role.EMBEDDING, Role.HEAD)


@dataclass(frozen=True)
class WeightOptions:
    """Form of the parameters.

    lora_rank: rank of the changes, None for whole weights. scale_rule chooses int4 scales. place:
    device of the parameters, which need not be the one that computes.
    """

    lora_rank: int | None = None
    scale_rule: str = "minmax"
    place: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class _Weight:
    """A weight's stored form; base is its stored value, where only a change of it is trained."""

    format: WeightFormat
    dtype: torch.dtype
    base: EncodedWeight | None

    def rounded(self, value: Tensor, scale_rule: str) -> Tensor:
        """Return the value as the stored format can hold it, float32."""
        if self.format is UNQUANTIZED:
            return value.to(self.dtype).float()
        results, _ = self.format.quantize(value, scale_rule)
        return self.format.encoded(results).dequantize(torch.float32)


class TrainedWeights:
    """Parameters of the weights that are trained; `parameters` is the whole state."""

    def __init__(self, source: WeightSource, names: Sequence[str], options: WeightOptions) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._source, self._options = source, options
        self._weights = {name: self._open(name) for name in names}

    @property
    def names(self) -> list[str]:
        """Released names of the trained weights."""
        return list(self._weights)

    def values(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return every weight on the device that computes, rounded, with its gradient's path."""
        with torch.autocast(self._source.device.type, enabled=False):
            return {name: self._value(name).to(dtype) for name in self._weights}

    @torch.no_grad()
    def unrounded(self, name: str) -> Tensor:
        """Return a weight as it is to be written, before it is rounded, float32."""
        return self._unrounded(name)

    def _value(self, name: str) -> Tensor:
        value = self._unrounded(name)
        with torch.no_grad():
            error = self._weights[name].rounded(value, self._options.scale_rule) - value
        return value + error

    def _unrounded(self, name: str) -> Tensor:
        device, base = self._source.device, self._weights[name].base
        if base is None:
            return self.parameters[name].to(device)
        up, down = (self.parameters[name + part].to(device) for part in (UP, DOWN))
        return base.dequantize(torch.float32) + up @ down

    def _open(self, name: str) -> _Weight:
        stored, options = self._source.stored(name), self._options
        encoded = self._source.encoded(name)
        if options.lora_rank is None or not _is_linear(stored.weight):
            value = encoded.dequantize(torch.float32)
            self.parameters[name] = nn.Parameter(value.to(options.place, copy=True))
            return _Weight(stored.format, encoded.codes.dtype, base=None)
        self._add_change(name, stored.weight.shape, options.lora_rank)
        return _Weight(stored.format, encoded.codes.dtype, base=encoded)

    def _add_change(self, name: str, shape: tuple[int, ...], rank: int) -> None:
        """Add a change of rank at most `rank`, zero at first."""
        rows, columns = shape
        rank = min(rank, rows, columns)
        random = torch.Generator().manual_seed(self._options.seed + len(self.parameters))
        down = torch.randn(rank, columns, generator=random) * columns**-0.5
        place = self._options.place
        self.parameters[name + DOWN] = nn.Parameter(down.to(place))
        self.parameters[name + UP] = nn.Parameter(torch.zeros(rows, rank, device=place))


def trainable_names(source: WeightSource) -> list[str]:
    """Return the weights that the MTP modules were loaded from and that training changes."""
    return [name for name in sorted(source.loaded) if is_trained(source.stored(name).weight)]


def is_trained(spec: TensorSpec) -> bool:
    """Return True for a weight of an MTP module but for embedding, head, and what picks without a
    gradient: the bias by which experts are picked, and indexers."""
    picks = spec.of_indexer or (spec.role is Role.ROUTER and len(spec.shape) == 1)
    return spec.mtp_layer is not None and spec.role not in _FROZEN_ROLES and not picks


def _is_linear(spec: TensorSpec) -> bool:
    """Return True for a matrix that rows are multiplied by, but for the small one of a router."""
    return len(spec.shape) == 2 and spec.role is not Role.ROUTER
