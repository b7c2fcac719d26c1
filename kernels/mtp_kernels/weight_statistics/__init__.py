"""Statistics of stored weights from one pass over their codes, without dequantizing them.

Extremes and squares are taken of the codes by the groups that share a scale, and multiplied by the
scales afterwards. All backends find the same extremes and counts; sums of squares agree with those
of the dequantized fp32 values within a relative 1e-5, and usually 1e-7. `scale` is the multiplier
in weight ≈ code * scale.

Backend "auto" is "cpu" for codes of 1 MB and more. Below, "reference" is done before the compiled
code, which takes a second or two per format when a machine needs it first, could pay.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

import torch

from mtp_kernels.quantize.layouts import (
    BLOCK,
    E4M3_MAX,
    SIGN_BITS,
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    QuantizedWeight,
    W4AFp8,
)
from mtp_kernels.weight_statistics.figures import (
    UNSOUND,
    CodeGroups,
    Difference,
    WeightStatistics,
)

__all__ = [
    "BACKENDS",
    "UNSOUND",
    "CodeGroups",
    "Difference",
    "WeightStatistics",
    "difference",
    "float_statistics",
    "quantized_statistics",
]

BACKENDS = {
    "reference": "mtp_kernels.weight_statistics.reference",
    "cpu": "mtp_kernels.weight_statistics.cpu",
}

_COMPILED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_COMPILED_BYTES = 1 << 20


class Backend(Protocol):
    """Functions of a module named in BACKENDS; tensors are contiguous and in main memory."""

    def float_group(self, values: torch.Tensor) -> CodeGroups: ...

    def fp8_groups(self, codes: torch.Tensor, rows: int, columns: int) -> CodeGroups: ...

    def int8_groups(self, codes: torch.Tensor) -> CodeGroups: ...

    def int4_groups(self, pairs: torch.Tensor, groups: int, flipped: int) -> CodeGroups: ...

    def difference(self, wanted: torch.Tensor, found: torch.Tensor) -> Difference: ...


def float_statistics(values: torch.Tensor, *, backend: str = "auto") -> WeightStatistics:
    """Statistics of values of any shape in a floating-point dtype."""
    flat = values.contiguous().reshape(-1)
    if flat.dtype not in _COMPILED_DTYPES:
        flat = flat.to(torch.float32)
    groups = _backend(backend, flat).float_group(flat)
    return _statistics(groups, torch.ones(1), flat.numel())


def quantized_statistics(weight: QuantizedWeight, *, backend: str = "auto") -> WeightStatistics:
    """Statistics of a quantized weight, unsound where dequantizing refuses it: for scales that are
    not above 0, but for those of fp8 blocks of zeros."""
    match weight:
        case Fp8Block():
            return _of_blocks(weight, backend)
        case Fp8Channel():
            codes = weight.codes.contiguous()
            groups = _backend(backend, codes).fp8_groups(codes, 1, codes.shape[1])
            elements = codes.numel()
        case Int8Channel():
            codes = weight.packed.contiguous().view(torch.uint8)
            groups, elements = _backend(backend, codes).int8_groups(codes), codes.numel()
        case Int4Group() | W4AFp8():
            pairs = weight.packed.contiguous().view(torch.uint8)
            flipped = SIGN_BITS & 0xFF if isinstance(weight, W4AFp8) else 0
            groups = _backend(backend, pairs).int4_groups(pairs, weight.scale.shape[1], flipped)
            elements = 2 * pairs.numel()
    if not (weight.scale > 0).all():
        return UNSOUND
    return _statistics(groups, weight.scale.to(torch.float32), elements)


def _of_blocks(weight: Fp8Block, backend: str) -> WeightStatistics:
    codes, scale = weight.codes.contiguous(), weight.scale.to(torch.float32)
    groups = _backend(backend, codes).fp8_groups(codes, BLOCK, BLOCK)
    used = (groups.low != 0) | (groups.high != 0)
    if not ((scale > 0) | ((scale == 0) & ~used)).all():
        return UNSOUND
    full = (groups.low == -E4M3_MAX) | (groups.high == E4M3_MAX)
    return replace(
        _statistics(groups, scale, codes.numel()),
        blocks=int(used.sum()),
        full_blocks=int(full.sum()),
        power_of_two_scales=bool((torch.frexp(scale)[0] == 0.5).all()),
    )


def difference(wanted: torch.Tensor, found: torch.Tensor, *, backend: str = "auto") -> Difference:
    """Difference of fp32 values from those that are wanted, of one shape, summed in float64."""
    wanted, found = (values.contiguous().reshape(-1) for values in (wanted, found))
    return _backend(backend, wanted).difference(wanted, found)


def _statistics(groups: CodeGroups, scale: torch.Tensor, elements: int) -> WeightStatistics:
    """Join the groups under their fp32 scales, whose products with the codes must be finite."""
    low, high = float((groups.low * scale).min()), float((groups.high * scale).max())
    square_sum = float((groups.square_sum * scale.to(torch.float64).square()).sum())
    if not (math.isfinite(low) and math.isfinite(high)):
        square_sum = math.nan
    return WeightStatistics(elements, low, high, square_sum, outer_codes=groups.outer)


def _backend(name: str, codes: torch.Tensor) -> Backend:
    if name == "auto":
        name = "cpu" if codes.nbytes >= _LEAST_COMPILED_BYTES else "reference"
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {list(BACKENDS)}, found {name!r}")
    return cast(Backend, import_module(BACKENDS[name]))
