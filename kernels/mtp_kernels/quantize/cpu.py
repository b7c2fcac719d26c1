"""Fused CPU backend: the compiled passes of array_conversions on the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mtp_kernels.quantize import array_conversions
from mtp_kernels.quantize.layouts import RowStats

_BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
_ARRAY_DTYPES = {torch.bfloat16: np.uint16, torch.float32: np.float32}


def supports(device: torch.device) -> bool:
    """Return True for tensors in main memory."""
    return device.type == "cpu"


def _on_tensors(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays as one of tensors; both share their memory."""

    def on_tensors(*arguments: Any) -> Any:
        return _tensors(compute(*map(_array, arguments)))

    return on_tensors


def _array(argument: Any) -> Any:
    if argument is None:
        return array_conversions.NO_BLOCK_SCALE
    if isinstance(argument, torch.dtype):
        return _ARRAY_DTYPES[argument]
    if isinstance(argument, torch.Tensor):
        return argument.view(_BITS.get(argument.dtype, argument.dtype)).numpy()
    return argument


def _tensors(result: Any) -> Any:
    if isinstance(result, array_conversions.Stats):
        return RowStats(*map(torch.from_numpy, result))
    return tuple(map(_tensors, result)) if isinstance(result, tuple) else torch.from_numpy(result)


dequantize_fp8_block = _on_tensors(array_conversions.dequantize_fp8_block)
quantize_fp8_block = _on_tensors(array_conversions.quantize_fp8_block)
quantize_int8_channel = _on_tensors(array_conversions.quantize_int8_channel)
quantize_int4_group = _on_tensors(array_conversions.quantize_int4_group)
dequantize_int8_channel = _on_tensors(array_conversions.dequantize_int8_channel)
dequantize_int4_group = _on_tensors(array_conversions.dequantize_int4_group)
