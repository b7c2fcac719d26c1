"""Quantize and dequantize weight matrices: fp8 blocks, int8 channels, int4 groups, w4afp8.

Weights are read as they are stored, computed with in fp32 and rounded once. All backends give
the same bits. `scale` is the multiplier in weight ≈ code * scale. These functions take tensors and
import torch when they are called; array_conversions has those that do without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from mtp_kernels.quantize import checks
from mtp_kernels.quantize.layouts import (
    SCALE_FACTORS,
    SIGN_BITS,
    W4AFP8_GROUP,
    ErrorStats,
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    QuantizedWeight,
    RowStats,
    W4AFp8,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "BACKENDS",
    "QUANTIZERS",
    "SCALE_FACTORS",
    "ErrorStats",
    "Fp8Block",
    "Fp8Channel",
    "Int4Group",
    "Int8Channel",
    "W4AFp8",
    "checked_values",
    "dequantize_fp8_block",
    "dequantize_int4_group",
    "dequantize_int8_channel",
    "dequantize_w4afp8",
    "error_of",
    "error_stats",
    "load_backend",
    "quantize_fp8_block",
    "quantize_int4_group",
    "quantize_int8_channel",
    "quantize_w4afp8",
]

BACKENDS = {
    "reference": "mtp_kernels.quantize.reference",
    "cpu": "mtp_kernels.quantize.cpu",
    "triton_cuda": "mtp_kernels.quantize.triton_cuda",
}


class Backend(Protocol):
    """Functions of a module named in BACKENDS; sources are checked, contiguous, on its device.

    Codes of integers are bytes: code + 128, or pairs of code + 8, the even column's low. The codes
    of fp8 and weights that are returned may be the bits of their dtype.
    """

    def supports(self, device: torch.device) -> bool: ...

    def dequantize_fp8_block(
        self, codes: torch.Tensor, block_scale: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, RowStats]: ...

    def quantize_fp8_block(
        self, source: torch.Tensor, power_of_two: bool
    ) -> tuple[torch.Tensor, torch.Tensor, RowStats]: ...

    def quantize_int8_channel(
        self, source: torch.Tensor, block_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, RowStats]: ...

    def quantize_int4_group(
        self,
        source: torch.Tensor,
        block_scale: torch.Tensor | None,
        group_size: int,
        factors: tuple[float, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, RowStats]: ...

    def dequantize_int8_channel(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor: ...

    def dequantize_int4_group(
        self, pairs: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor: ...


def dequantize_fp8_block(
    source: Fp8Block, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> tuple[torch.Tensor, ErrorStats]:
    """Weights [N, K] of a 128x128 block fp8 source: code * scale in fp32, rounded once to dtype.

    dtype is bfloat16, the default, or float32. The error is that last rounding's. A zero scale
    stands for a block of zeros. Raises ValueError for NaN codes, for scales that are negative, NaN,
    infinite, or zero over nonzero codes. Source: DeepSeek-V3 technical report, section 3.3.
    """
    codes, block_scale = checks.check_fp8_block(source)
    dtype = checks.output_dtype(dtype)
    weights, stats = _backend(backend, codes).dequantize_fp8_block(codes, block_scale, dtype)
    return weights.view(dtype), error_stats(codes, stats)


def quantize_fp8_block(
    weights: torch.Tensor, *, power_of_two_scale: bool = False, backend: str = "auto"
) -> tuple[Fp8Block, ErrorStats]:
    """Codes F8_E4M3 [N, K], scale F32 amax/448 of each 128x128 block, from floats [N, K].

    Codes are rounded to nearest even and saturate at 448. power_of_two_scale rounds the scale up
    to a power of two before quantizing (`scale_fmt: ue8m0` of DeepSeek-V3.1). A zero block has
    scale 1. Raises ValueError for NaN or infinite weights.
    """
    import torch

    values = checks.check_floats("weights", weights)
    codes, scale, stats = _backend(backend, values).quantize_fp8_block(values, power_of_two_scale)
    return Fp8Block(codes.view(torch.float8_e4m3fn), scale), error_stats(values, stats)


def quantize_int8_channel(
    source: torch.Tensor | Fp8Block, *, backend: str = "auto"
) -> tuple[Int8Channel, ErrorStats]:
    """Packed I32 [N, K/4], scale BF16 [N, 1] from floats or fp8 block weights [N, K].

    scale = bf16(amax / 127) of the row, code = round(weight / scale) in [-127, 127]; a zero row
    has scale 1. Raises ValueError for K not divisible by 4 and for NaN or infinite weights.
    Source: compressed-tensors `pack-quantized`, strategy channel.
    """
    import torch

    values, block_scale = checks.check_source(source)
    if values.shape[1] % 4:
        raise ValueError(f"int8: K = {values.shape[1]} is not divisible by 4, the codes of a word")
    implementation = _backend(backend, values)
    codes, scale, stats = implementation.quantize_int8_channel(values, block_scale)
    return Int8Channel(codes.view(torch.int32), scale.bfloat16()), error_stats(values, stats)


def quantize_int4_group(
    source: torch.Tensor | Fp8Block,
    *,
    group_size: int = 128,
    scale_rule: str = "minmax",
    backend: str = "auto",
) -> tuple[Int4Group, ErrorStats]:
    """Packed I32 [N, K/8], scale BF16 [N, K/group_size] from floats or fp8 block weights [N, K].

    minmax: scale = bf16(amax / 7.5) of the group; mse: the factor of SCALE_FACTORS on it with the
    least squared error. code = round(weight / scale) clamped to [-8, 7]; a zero group has scale 1.
    Raises ValueError for a group size other than 32, 64, 128, for K not divisible by it, and for
    NaN or infinite weights. Source: compressed-tensors `pack-quantized`, strategy group.
    """
    import torch

    pairs, scale, stats = _quantize_int4(source, group_size, scale_rule, backend)
    return Int4Group(pairs.view(torch.int32), scale.bfloat16()), stats


def quantize_w4afp8(
    source: torch.Tensor | Fp8Block, *, scale_rule: str = "minmax", backend: str = "auto"
) -> tuple[W4AFp8, ErrorStats]:
    """Packed I8 [N, K/2], scale F32 [N, K/128] from floats or fp8 block weights [N, K].

    Codes and scales are those of int4 groups of 128: SGLang rounds the scale to bf16 when it
    loads, so the stored fp32 is already a bf16 value. Raises ValueError as quantize_int4_group.
    Source: SGLang `quantization/w4afp8.py`.
    """
    import torch

    pairs, scale, stats = _quantize_int4(source, W4AFP8_GROUP, scale_rule, backend)
    return W4AFp8(pairs.view(torch.int8).bitwise_xor_(SIGN_BITS), scale), stats


def dequantize_int8_channel(
    weight: Int8Channel, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Weights [N, K] in bfloat16, the default, or float32: code * scale in fp32, rounded once.

    Raises ValueError for scales that are not finite and positive.
    """
    codes, scale = checks.check_packed(weight)
    dtype = checks.output_dtype(dtype)
    return _backend(backend, codes).dequantize_int8_channel(codes, scale, dtype).view(dtype)


def dequantize_int4_group(
    weight: Int4Group, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Weights [N, K] in bfloat16, the default, or float32: code * scale in fp32, rounded once.

    The group size is K over the scale's columns. Raises ValueError for another size than 32, 64
    or 128, and for scales that are not finite and positive.
    """
    pairs, scale = checks.check_packed(weight)
    dtype = checks.output_dtype(dtype)
    return _backend(backend, pairs).dequantize_int4_group(pairs, scale, dtype).view(dtype)


def dequantize_w4afp8(
    weight: W4AFp8, dtype: torch.dtype | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """Weights [N, K] in bfloat16, the default, or float32: code * scale in fp32, rounded once.

    Raises ValueError for K not divisible by 128 and for scales that are not finite and positive.
    """
    pairs, scale = checks.check_packed(weight)
    dtype = checks.output_dtype(dtype)
    pairs = pairs.bitwise_xor(SIGN_BITS & 0xFF)
    return _backend(backend, pairs).dequantize_int4_group(pairs, scale, dtype).view(dtype)


def _quantize_int4(
    source: torch.Tensor | Fp8Block, group_size: int, scale_rule: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor, ErrorStats]:
    values, block_scale = checks.check_source(source)
    checks.check_group_size(values.shape[1], group_size)
    if scale_rule not in SCALE_FACTORS:
        raise ValueError(f"scale rule: expected one of {list(SCALE_FACTORS)}, found {scale_rule!r}")
    pairs, scale, stats = _backend(backend, values).quantize_int4_group(
        values, block_scale, group_size, SCALE_FACTORS[scale_rule]
    )
    return pairs, scale, error_stats(values, stats)


# Conversions into layouts that the kernels make, by the name of the layout.
QUANTIZERS: dict[str, Callable[..., tuple[QuantizedWeight, ErrorStats]]] = {
    "fp8_block": quantize_fp8_block,
    "int8_channel": quantize_int8_channel,
    "int4_group": quantize_int4_group,
    "w4afp8": quantize_w4afp8,
}


def checked_values(source: torch.Tensor | Fp8Block) -> torch.Tensor:
    """Return a source's fp32 values (ValueError for NaN or infinite ones)."""
    import torch

    if isinstance(source, Fp8Block):
        source = dequantize_fp8_block(source, torch.float32)[0]
    values = source.float()
    if not values.isfinite().all():
        raise ValueError("weights: expected finite numbers, found NaN or infinite ones")
    return values


def error_of(values: torch.Tensor, restored: torch.Tensor) -> ErrorStats:
    """Return the error of fp32 weights [n, K] that stand for others."""
    from mtp_kernels.quantize.reference import row_stats

    return error_stats(values, row_stats(values, restored))


def load_backend(device: torch.device | str) -> None:
    """Import the backend of a device, which else the first call does: it takes seconds."""
    import torch

    _backend_on("auto", torch.device(device))


def _backend(name: str, values: torch.Tensor) -> Backend:
    return _backend_on(name, values.device)


@cache
def _backend_on(name: str, device: torch.device) -> Backend:
    if name == "auto":
        name = {"cpu": "cpu", "cuda": "triton_cuda"}.get(device.type, "reference")
    if name not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {list(BACKENDS)}, found {name!r}")
    backend = cast(Backend, import_module(BACKENDS[name]))
    if not backend.supports(device):
        raise ValueError(f"backend {name}: does not run on tensors on {device}")
    return backend


def error_stats(source: torch.Tensor, stats: RowStats) -> ErrorStats:
    """Return the error of all rows of a source (ValueError for one that is not finite)."""
    checks.check_finite(source, stats)
    return ErrorStats.of_rows(
        source.numel(),
        signal=stats.signal.tolist(),
        error=stats.error.tolist(),
        max_error=float(stats.max_error.max()),
    )
