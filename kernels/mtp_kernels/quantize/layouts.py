"""Quantized weights as tensors, the error they carry, and the numbers that define each scheme.

Everything here is shared by all backends, which must agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

BLOCK = 128  # rows and columns of one fp8 block
LANES = 128  # columns of one segment, the unit in which a row's energies are added up
GROUP_SIZES = (32, 64, 128)
W4AFP8_GROUP = 128
SIGN_BITS = -0x78  # 0x88 as int8: code + 8 and the two's complement differ in each nibble's sign

E4M3_MAX = 448.0
INT8_MAX = 127.0  # codes in [-127, 127]; amax / 127 cannot clip, whichever way the scale rounds
INT4_MIN, INT4_MAX = -8.0, 7.0
INT4_HALF_RANGE = 7.5  # amax / 7.5, the symmetric rule of compressed-tensors' calculate_qparams

SCALE_FLOOR = 2.0**-126  # smallest normal fp32 and bf16: a smaller scale would lose its precision
ZERO_SCALE = 1.0  # of a group, row or block without a nonzero weight

# Factors on amax / 7.5 that are tried for each group; the first with the least squared error wins.
# 15/14 is amax / 7, which makes a constant group exact.
SCALE_FACTORS: dict[str, tuple[float, ...]] = {
    "minmax": (1.0,),
    "mse": (1.0, 15 / 14, *(1.0 - step / 20 for step in range(1, 9))),
}


class OutOfRangeError(ValueError):
    """Weights, or the scales that they need, beyond the largest number of a format: they may be
    sound, and another format may hold them."""


@dataclass(frozen=True)
class Fp8Block:
    """codes F8_E4M3 [N, K]; scale of floats or F8_E8M0 [⌈N/128⌉, ⌈K/128⌉]."""

    codes: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Fp8Channel:
    """codes F8_E4M3 [N, K]; scale F32 or BF16 [N, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Int8Channel:
    """packed I32 [N, K/4], four bytes code + 128, least significant first; scale BF16 [N, 1]."""

    packed: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Int4Group:
    """packed I32 [N, K/8], eight nibbles code + 8, least significant first; scale BF16 [N, K/g]."""

    packed: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class W4AFp8:
    """packed I8 [N, K/2], two's-complement nibbles, low nibble = even k; scale F32 [N, K/128]."""

    packed: torch.Tensor
    scale: torch.Tensor


QuantizedWeight = Fp8Block | Fp8Channel | Int8Channel | Int4Group | W4AFp8

# By the name that manifests have.
LAYOUTS: dict[str, type[QuantizedWeight]] = {
    "fp8_block": Fp8Block,
    "fp8_channel": Fp8Channel,
    "int8_channel": Int8Channel,
    "int4_group": Int4Group,
    "w4afp8": W4AFp8,
}


class RowStats(NamedTuple):
    """Error of each row: signal and error energy F64 [N], largest error F32 [N].

    A row's energy is added up in one fixed order, so that it is the same to the bit everywhere:
    column k belongs to lane k mod 128; a lane adds its float64 squares from left to right; the
    128 lanes are added pairwise, the lower half to the upper half, until one is left.
    """

    signal: torch.Tensor
    error: torch.Tensor
    max_error: torch.Tensor


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise of two energies in dB; infinite where nothing was lost."""
    if noise == 0.0:
        return math.inf
    ratio = signal / noise
    return 10.0 * math.log10(ratio) if ratio else -math.inf


@dataclass(frozen=True)
class ErrorStats:
    """Signal energy Σw², error energy Σ(w-ŵ)² and max |w-ŵ| over a tensor's weights."""

    elements: int
    signal_energy: float
    error_energy: float
    max_error: float

    @classmethod
    def of_rows(
        cls, elements: int, signal: Iterable[float], error: Iterable[float], max_error: float
    ) -> ErrorStats:
        """Add up the energies of rows, exactly: neither their order nor the device matters."""
        return cls(
            elements=elements,
            signal_energy=math.fsum(signal),
            error_energy=math.fsum(error),
            max_error=max_error,
        )

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB; infinite where nothing was lost."""
        return sqnr_db(self.signal_energy, self.error_energy)
