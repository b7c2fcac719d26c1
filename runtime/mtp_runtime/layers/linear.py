"""One Linear for every stored format: the weight knows how to become dense, the Linear multiplies.

A new format is one class with `dense` and one line in FORMATS; models never see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mtp_export.errors import InvalidInputError
from mtp_kernels import quantize


class Weight(Protocol):
    """A matrix [out, in] in some stored form."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [out, in] in dtype, dequantized now."""


@dataclass(frozen=True)
class Dense:
    """A matrix kept as floating point: bf16, fp16 or fp32."""

    matrix: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.matrix.to(dtype)


@dataclass(frozen=True)
class Fp8Block:
    """float8_e4m3fn [out, in] with a scale per 128x128 block, ragged edges included."""

    stored: quantize.Fp8Block

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.codes.shape[0], self.stored.codes.shape[1]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        try:
            return quantize.dequantize_fp8_block(self.stored, dtype)[0]
        except ValueError as error:
            raise damaged(self, error) from error


@dataclass(frozen=True)
class Int8Channel:
    """int8 with a scale per output channel; the layout of mtp_kernels.quantize.Int8Channel."""

    stored: quantize.Int8Channel

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.packed.shape[0], self.stored.packed.shape[1] * 4

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        try:
            return quantize.dequantize_int8_channel(self.stored, dtype)
        except ValueError as error:
            raise damaged(self, error) from error


@dataclass(frozen=True)
class Int4Group:
    """int4 with a scale per group of inputs; the layout of mtp_kernels.quantize.Int4Group."""

    stored: quantize.Int4Group

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.packed.shape[0], self.stored.packed.shape[1] * 8

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        try:
            return quantize.dequantize_int4_group(self.stored, dtype)
        except ValueError as error:
            raise damaged(self, error) from error


@dataclass(frozen=True)
class W4AFp8:
    """int4 as SGLang's w4afp8 has it; the layout of mtp_kernels.quantize.W4AFp8."""

    stored: quantize.W4AFp8

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.packed.shape[0], self.stored.packed.shape[1] * 2

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        try:
            return quantize.dequantize_w4afp8(self.stored, dtype)
        except ValueError as error:
            raise damaged(self, error) from error


@dataclass(frozen=True)
class Stacked:
    """Matrices of the same input on top of each other, whatever each is stored as."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.dense(dtype) for part in self.parts])


FORMATS: dict[str, type[Weight]] = {
    "dense": Dense,
    "fp8_block": Fp8Block,
    "int8_channel": Int8Channel,
    "int4_group": Int4Group,
    "w4afp8": W4AFp8,
    "stacked": Stacked,
}


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T for x [T, in]; the result has the dtype of x.

    `transposed` [in, out] is the weight made dense once; without it the weight is dequantized, or
    brought to the dtype of x, in every call, which is slower and holds it as it is stored.
    """

    weight: Weight
    transposed: torch.Tensor | None = None

    @classmethod
    def build(cls, weight: Weight, dtype: torch.dtype, keep_dense: bool) -> Linear:
        """keep_dense: dequantize now and keep the matrix instead of the stored form."""
        if not keep_dense:
            return cls(weight)
        transposed = weight.dense(dtype).t().contiguous()
        return cls(Dense(transposed.t()), transposed)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """The transposed weight [in, out], dense."""
        return self.weight.dense(dtype).t() if self.transposed is None else self.transposed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.matrix(x.dtype))


def stack(parts: Sequence[Weight]) -> Weight:
    """One weight out of several over the same input; dense parts become one dense matrix."""
    if all(isinstance(part, Dense) for part in parts):
        return Dense(torch.cat([part.matrix for part in parts if isinstance(part, Dense)]))
    return Stacked(tuple(parts))


def damaged(weight: Weight, error: ValueError) -> InvalidInputError:
    """The error of a stored weight that cannot be dequantized."""
    return InvalidInputError(
        f"A weight of shape {list(weight.shape)} cannot be dequantized",
        found=str(error),
        todo="The weight or its scale is damaged: get the checkpoint again",
    )
