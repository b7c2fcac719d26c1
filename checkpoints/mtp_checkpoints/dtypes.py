"""Element types of stored tensors: their sizes, and the torch and array dtypes that hold them."""

from __future__ import annotations

import math
from enum import StrEnum
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import torch


class DType(StrEnum):
    """Element type by its name in manifests and messages; a str, so JSON holds it as it is.

    bits are those of one unit: of one element or, of types that pack `unit_elements` of a row with
    their scales, of one such block. torch_name and array_name are empty where neither has it.
    """

    bits: int
    torch_name: str
    array_name: str
    unit_elements: int

    def __new__(
        cls, name: str, bits: int, torch_name: str = "", array_name: str = "", unit: int = 1
    ) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.bits, member.unit_elements = bits, unit
        member.torch_name, member.array_name = torch_name, array_name
        return member

    BOOL = "BOOL", 8, "bool"
    F4 = "F4", 4
    F6_E2M3 = "F6_E2M3", 6
    F6_E3M2 = "F6_E3M2", 6
    U8 = "U8", 8, "uint8"
    I8 = "I8", 8, "int8"
    F8_E5M2 = "F8_E5M2", 8, "float8_e5m2"
    F8_E4M3 = "F8_E4M3", 8, "float8_e4m3fn", "uint8"  # numpy has no fp8: its bits
    F8_E8M0 = "F8_E8M0", 8, "float8_e8m0fnu"
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8, "float8_e4m3fnuz"
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8, "float8_e5m2fnuz"
    I16 = "I16", 16, "int16"
    U16 = "U16", 16, "uint16"
    F16 = "F16", 16, "float16", "float16"
    BF16 = "BF16", 16, "bfloat16", "uint16"  # nor bf16
    I32 = "I32", 32, "int32"
    U32 = "U32", 32, "uint32"
    F32 = "F32", 32, "float32", "float32"
    C64 = "C64", 64, "complex64"
    F64 = "F64", 64, "float64"
    I64 = "I64", 64, "int64"
    U64 = "U64", 64, "uint64"
    # Blocks of ggml, llama.cpp's library: a row is held as bytes, whole blocks of them.
    GGML_Q4_0 = "GGML_Q4_0", 8 * 18, "uint8", "uint8", 32
    GGML_Q4_1 = "GGML_Q4_1", 8 * 20, "uint8", "uint8", 32
    GGML_Q5_0 = "GGML_Q5_0", 8 * 22, "uint8", "uint8", 32
    GGML_Q5_1 = "GGML_Q5_1", 8 * 24, "uint8", "uint8", 32
    GGML_Q8_0 = "GGML_Q8_0", 8 * 34, "uint8", "uint8", 32
    GGML_MXFP4 = "GGML_MXFP4", 8 * 17, "uint8", "uint8", 32
    GGML_Q4_K = "GGML_Q4_K", 8 * 144, "uint8", "uint8", 256
    GGML_Q5_K = "GGML_Q5_K", 8 * 176, "uint8", "uint8", 256
    GGML_Q6_K = "GGML_Q6_K", 8 * 210, "uint8", "uint8", 256
    # Those that nothing here decodes.
    GGML_Q2_K = "GGML_Q2_K", 8 * 84, "", "", 256
    GGML_Q3_K = "GGML_Q3_K", 8 * 110, "", "", 256
    GGML_IQ1_S = "GGML_IQ1_S", 8 * 50, "", "", 256
    GGML_IQ1_M = "GGML_IQ1_M", 8 * 56, "", "", 256
    GGML_IQ2_XXS = "GGML_IQ2_XXS", 8 * 66, "", "", 256
    GGML_IQ2_XS = "GGML_IQ2_XS", 8 * 74, "", "", 256
    GGML_IQ2_S = "GGML_IQ2_S", 8 * 82, "", "", 256
    GGML_IQ3_XXS = "GGML_IQ3_XXS", 8 * 98, "", "", 256
    GGML_IQ3_S = "GGML_IQ3_S", 8 * 110, "", "", 256
    GGML_IQ4_NL = "GGML_IQ4_NL", 8 * 18, "", "", 32
    GGML_IQ4_XS = "GGML_IQ4_XS", 8 * 136, "", "", 256
    GGML_TQ1_0 = "GGML_TQ1_0", 8 * 54, "", "", 256
    GGML_TQ2_0 = "GGML_TQ2_0", 8 * 66, "", "", 256
    GGML_NVFP4 = "GGML_NVFP4", 8 * 36, "", "", 64

    @property
    def is_packed(self) -> bool:
        """True for blocks, in which elements have no bytes of their own."""
        return self.unit_elements > 1

    @property
    def is_opaque(self) -> bool:
        """True for blocks of which only the bytes are known."""
        return self.is_packed and not self.torch_name


_OF_TORCH = {dtype.torch_name: dtype for dtype in DType if dtype.torch_name and not dtype.is_packed}


def dtype_name(dtype: torch.dtype) -> DType:
    """Return the element type of a torch dtype (KeyError for one that is not stored)."""
    return _OF_TORCH[str(dtype).removeprefix("torch.")]


@cache
def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch dtype of an element type (KeyError for one that torch cannot hold)."""
    import torch

    if not dtype.torch_name:
        raise KeyError(dtype)
    result = getattr(torch, dtype.torch_name)
    assert isinstance(result, torch.dtype)
    return result


def held_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which memory holds a tensor: of blocks, its rows [..., bytes]."""
    if not dtype.is_packed:
        return shape
    return (*shape[:-1], tensor_bytes(dtype, shape[-1:]))


@lru_cache(maxsize=1 << 12)  # a model of 100,000 tensors has tens of shapes
def tensor_bytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor (ValueError if they are no whole number, or a row no whole
    number of units)."""
    if dtype.unit_elements > 1 and (not shape or shape[-1] % dtype.unit_elements):
        raise ValueError(f"a row of {dtype} is not a multiple of {dtype.unit_elements} elements")
    bits = dtype.bits * math.prod(shape) // dtype.unit_elements
    if bits % 8:
        raise ValueError(f"{bits} bits do not fill whole bytes")
    return bits // 8


ANY_LENGTH = -1  # as the size of a vector that no other shape decides


class OutputTensor(NamedTuple):
    """Tensor to be written, or read."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


# Of scales of fp8, which engines widen as they load them: those of Qwen's releases and of
# llm-compressor have the model's dtype, some others are powers of two.
WIDE_SCALE_DTYPES = (DType.F32, DType.BF16, DType.F16)
SCALE_DTYPES = (*WIDE_SCALE_DTYPES, DType.F8_E8M0)
