"""Conversions of a weight matrix that are timed, with the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mtp_kernels import quantize


def operations(weights: torch.Tensor) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return name -> (bytes read and written per weight, call)."""
    bf16 = weights.to(torch.bfloat16)
    fp8, _ = quantize.quantize_fp8_block(bf16)
    int8, _ = quantize.quantize_int8_channel(fp8)
    int4, _ = quantize.quantize_int4_group(fp8)
    w4afp8, _ = quantize.quantize_w4afp8(fp8)
    return {
        "fp8 -> bf16": (3, lambda: quantize.dequantize_fp8_block(fp8)),
        "bf16 -> fp8": (3, lambda: quantize.quantize_fp8_block(bf16)),
        "fp8 -> int8": (2, lambda: quantize.quantize_int8_channel(fp8)),
        "bf16 -> int8": (3, lambda: quantize.quantize_int8_channel(bf16)),
        "fp8 -> int4": (1.5, lambda: quantize.quantize_int4_group(fp8)),
        "bf16 -> int4": (2.5, lambda: quantize.quantize_int4_group(bf16)),
        "fp8 -> int4 mse": (1.5, lambda: quantize.quantize_int4_group(fp8, scale_rule="mse")),
        "fp8 -> w4afp8": (1.5, lambda: quantize.quantize_w4afp8(fp8)),
        "int8 -> bf16": (3, lambda: quantize.dequantize_int8_channel(int8)),
        "int4 -> bf16": (2.5, lambda: quantize.dequantize_int4_group(int4)),
        "w4afp8 -> bf16": (2.5, lambda: quantize.dequantize_w4afp8(w4afp8)),
    }
