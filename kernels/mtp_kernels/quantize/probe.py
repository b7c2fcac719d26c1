"""Comparison of a device's conversions with those that define the bits.

Devices without a backend of their own convert by torch, which may divide or round otherwise there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mtp_kernels import quantize
from mtp_kernels.quantize.layouts import BLOCK, ErrorStats, Fp8Block

ROWS, COLUMNS = BLOCK + 3, 2 * BLOCK
Source = torch.Tensor | Fp8Block
Conversion = Callable[[Source], tuple[Any, ErrorStats]]

CONVERSIONS: dict[str, Conversion] = {
    "bf16": lambda source: _to_bf16(source),
    "fp8 blocks": lambda source: quantize.quantize_fp8_block(_values(source)),
    "int8 channels": lambda source: quantize.quantize_int8_channel(source),
    "int4 groups": lambda source: quantize.quantize_int4_group(source),
    "int4 groups of least error": lambda source: quantize.quantize_int4_group(
        source, group_size=32, scale_rule="mse"
    ),
    "w4afp8": lambda source: quantize.quantize_w4afp8(source),
}


def difference(device: str) -> str | None:
    """Return the first conversion that a device does not make with the bits of the reference on a
    CPU, or cannot make; None where it makes all."""
    for kind, source in _sources().items():
        for name, convert in CONVERSIONS.items():
            try:
                found, expected = convert(_moved(source, device)), convert(source)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                return f"{kind} to {name}: {str(error).strip().splitlines()[0]}"
            if not _same(found, expected):
                return f"{kind} to {name}: other bits"
    return None


def _sources() -> dict[str, Source]:
    """Return weights of every size, zeros and subnormal ones among them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, generator=generator)
    values *= 2.0 ** torch.randint(-20, 12, (ROWS, 1), generator=generator)
    values[:BLOCK, :BLOCK] = 0.0
    values[5] = 0.0
    values[7, ::3] = 2.0**-130
    block, _ = quantize.quantize_fp8_block(values, backend="reference")
    return {"bf16": values.bfloat16(), "float32": values, "fp8 blocks": block}


def _to_bf16(source: Source) -> tuple[Any, ErrorStats]:
    if isinstance(source, Fp8Block):
        return quantize.dequantize_fp8_block(source)
    rounded = source.to(torch.bfloat16)
    error = float((source.float() - rounded.float()).abs().max())
    return rounded, ErrorStats(source.numel(), 0.0, 0.0, error)


def _values(source: Source) -> torch.Tensor:
    if isinstance(source, Fp8Block):
        return quantize.dequantize_fp8_block(source, torch.float32)[0]
    return source


def _moved(source: Source, device: str) -> Source:
    if isinstance(source, Fp8Block):
        return replace(source, codes=source.codes.to(device), scale=source.scale.to(device))
    return source.to(device)


def _same(found: tuple[Any, ErrorStats], expected: tuple[Any, ErrorStats]) -> bool:
    pairs = zip(_tensors(found[0]), _tensors(expected[0]), strict=True)
    bits = all(torch.equal(_bits(one.cpu()), _bits(other)) for one, other in pairs)
    return bits and found[1] == expected[1]


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(vars(result).values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
