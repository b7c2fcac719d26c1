"""Safetensors dtypes: bits per element, and the torch and array dtypes of those that have them."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

TORCH_DTYPE_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
# Of arrays that hold weights: numpy has neither bf16 nor fp8, whose bits they hold.
ARRAY_DTYPES: dict[str, str] = {"F8_E4M3": "uint8", "BF16": "uint16", "F32": "float32"}

_NAMES_OF_TORCH = {name: dtype for dtype, name in TORCH_DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype (KeyError for one that it has no name for)."""
    return _NAMES_OF_TORCH[str(dtype).removeprefix("torch.")]


@lru_cache(maxsize=1 << 12)  # a model of 100,000 tensors has tens of shapes
def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of a known dtype (ValueError if they are no whole number)."""
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{bits} bits do not fill whole bytes")
    return bits // 8


@cache
def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name (KeyError for one torch cannot hold)."""
    import torch

    result = getattr(torch, TORCH_DTYPE_NAMES[dtype])
    assert isinstance(result, torch.dtype)
    return result


class OutputTensor(NamedTuple):
    """Tensor to be written; dtype is a safetensors dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)
