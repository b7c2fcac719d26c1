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


def by_compressed_tensors(weights: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Quantize and pack bf16 weights by compressed-tensors, given the scales (ours finds them)."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    packer = BaseCompressor.get_value_from_registry("pack-quantized")
    bf16 = weights.to(torch.bfloat16)
    calls = {}
    for name, bits, group_size, scale in (
        ("int8", 8, None, quantize.quantize_int8_channel(bf16)[0].scale),
        ("int4", 4, 128, quantize.quantize_int4_group(bf16)[0].scale),
    ):
        arguments = QuantizationArgs(
            num_bits=bits,
            type="int",
            symmetric=True,
            strategy="group" if group_size else "channel",
            group_size=group_size,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        state = {"weight": bf16, "weight_scale": scale}
        calls[name] = lambda state=state, scheme=scheme: packer.compress(state, scheme)
    return calls
