"""Powers of two that are folded into weights: columns that are multiplied, rows that are divided.

Floats hold their products exactly, so that a tensor which is not quantized loses nothing by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.containers.joined_halves import Computed
from mtp_checkpoints.dtypes import DType, tensor_bytes
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.weights.weight_values import WeightOnDisk

MOST = 8  # of an exponent's magnitude
_LETTERS = "abcdefghijklmnopq"  # of exponents from -MOST to MOST


@dataclass(frozen=True)
class Folding:
    """Exponents of the powers of two by which the columns of a weight [N, K] are multiplied, int8
    [K], and its rows divided, int8 [N]; None: by 1. A norm's weight [N] has rows alone, to which
    engines add the offset."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    offset: float = 0.0

    @property
    def changes(self) -> bool:
        """True where a scale is none of 1."""
        return any(one is not None and bool(one.any()) for one in (self.rows, self.columns))

    def of(self, values: Tensor, start: int = 0) -> Tensor:
        """Return rows [start, ...) of a weight, fp32, with the scales in it."""
        return self._scaled(values, start, 1)

    def undone(self, values: Tensor) -> Tensor:
        """Return a weight without the scales that are in it."""
        return self._scaled(values, 0, -1)

    def _scaled(self, values: Tensor, start: int, sign: int) -> Tensor:
        scaled = values + self.offset if self.offset else values
        if self.columns is not None:
            scaled = scaled * _powers(self.columns, sign)
        if self.rows is not None:
            own = _powers(self.rows[start : start + len(scaled)], -sign)
            scaled = scaled * own.reshape(-1, *[1] * (scaled.dim() - 1))
        return scaled - self.offset if self.offset else scaled

    def weight(self, source: WeightOnDisk) -> WeightOnDisk:
        """Return a source's weight with the scales in it: in its dtype, or in float32 if it is
        quantized; its bytes are computed when it is opened."""
        stored, first = source.stored, source.tensors[0]
        plain = stored.format == UNQUANTIZED
        dtype, shape = (first.dtype if plain else DType.F32), stored.weight.shape
        file = _Folded(source, self, dtype)
        tensor = TensorInfo(stored.weight.name, dtype, shape, file, 0, tensor_bytes(dtype, shape))
        if plain:
            return WeightOnDisk(stored, (tensor,))
        one = stored.tensors[0]._replace(name=tensor.name, shape=shape, dtypes=(dtype,))
        kept = stored._replace(format=UNQUANTIZED, tensors=(one,), transposed=False)
        return WeightOnDisk(kept, (tensor,))


UNFOLDED = Folding()


def as_letters(exponents: Tensor) -> str:
    """Return exponents as a manifest has them, a letter each: i for 0."""
    return "".join(_LETTERS[number + MOST] for number in exponents.tolist())


def of_letters(letters: str, count: int) -> Tensor | None:
    """Return exponents, int8 [count]; None for anything else."""
    if len(letters) != count or not set(letters) <= set(_LETTERS):
        return None
    return torch.tensor([_LETTERS.index(one) - MOST for one in letters], dtype=torch.int8)


@dataclass(frozen=True)
class _Folded:
    """A file that holds one weight alone, computed from a source's."""

    source: WeightOnDisk
    folding: Folding
    dtype: DType
    sha256: None = None

    @cached_property
    def path(self) -> Place:
        return self.source.tensors[0].path

    def open(self, once: range | None = None) -> Computed:
        """Read the weight and scale it (IoError, InvalidInputError for damaged scales)."""
        source = self.source
        values = source.encoded(0, source.rows).dequantize(torch.float32)
        dtype = torch.float32 if self.dtype == DType.F32 else source.whole_codes.dtype
        scaled = self.folding.of(values).to(dtype).contiguous()
        with closing(source.tensors[0].file.open()) as file:
            version = file.version
        data: Any = scaled.reshape(-1).view(torch.uint8).numpy()
        return Computed(data.data, version)


def folded(
    weights: Mapping[str, WeightOnDisk], foldings: Mapping[str, Folding]
) -> dict[str, WeightOnDisk]:
    """Return weights by name, those with foldings as their scales make them."""
    return {
        name: foldings[name].weight(one) if name in foldings else one
        for name, one in weights.items()
    }


def _powers(exponents: Tensor, sign: int) -> Tensor:
    table = torch.tensor([2.0**number for number in range(-MOST, MOST + 1)])
    return table[sign * exponents.long() + MOST]
