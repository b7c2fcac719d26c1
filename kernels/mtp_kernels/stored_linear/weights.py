"""Stored weights [N, K] that a linear layer may have, their shapes and values."""

from __future__ import annotations

import torch

from mtp_kernels import quantize
from mtp_kernels.quantize import checks
from mtp_kernels.quantize.layouts import (
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    QuantizedWeight,
    W4AFp8,
)

# A tensor is a weight that is not quantized, of any floating-point dtype.
StoredWeight = torch.Tensor | QuantizedWeight


def shape_of(weight: StoredWeight) -> tuple[int, int]:
    """Return [N, K] of a stored weight."""
    match weight:
        case torch.Tensor():
            rows, columns = weight.shape
        case Fp8Block() | Fp8Channel():
            rows, columns = weight.codes.shape
        case _:
            rows, columns = weight.packed.shape
            columns *= {Int8Channel: 4, Int4Group: 8, W4AFp8: 2}[type(weight)]
    return rows, columns


def dequantize(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [N, K] (ValueError for damaged codes or scales)."""
    match weight:
        case torch.Tensor():
            return weight.to(dtype)
        case Fp8Block():
            return quantize.dequantize_fp8_block(weight, dtype)[0]
        case Fp8Channel():
            return dequantize_fp8_channel(weight, dtype)
        case Int8Channel():
            return quantize.dequantize_int8_channel(weight, dtype)
        case Int4Group():
            return quantize.dequantize_int4_group(weight, dtype)
        case W4AFp8():
            return quantize.dequantize_w4afp8(weight, dtype)


def dequantize_fp8_channel(weight: Fp8Channel, dtype: torch.dtype) -> torch.Tensor:
    """Return code * scale in fp32, rounded once to dtype (ValueError for damaged ones)."""
    codes, scale = checks.check_fp8_channel(weight)
    values = codes.float()
    if values.isnan().any():
        raise ValueError("e4m3 codes: expected numbers, found NaN")
    return (values * scale).to(dtype)
