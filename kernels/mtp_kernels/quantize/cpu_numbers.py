"""Operations of the CPU backend on single numbers, free of branches and tables.

Bits are moved with integer operations, so that LLVM turns every loop over these into vector code;
fastmath stays off and nothing is contracted, so that the vector code computes what the reference
computes. numba widens sums of uint32 to 64 bits, which halves the vectors, hence the casts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mtp_kernels.cpu.jit import inner
from mtp_kernels.quantize import layouts

ROUNDER = np.float32(1.5 * 2.0**23)  # where the spacing of fp32 is 1: to nearest, ties to even

_CACHE_LINE = 64
_SCALE_FLOOR = np.float32(layouts.SCALE_FLOOR)
_ZERO_SCALE = np.float32(layouts.ZERO_SCALE)
_E4M3_ROUNDER = np.float32(2.0**14)  # its spacing is 2**-9, the smallest e4m3 subnormal
_E4M3_ROUNDER_BITS = np.uint32(0x46800000)
_E4M3_MAX_BITS = np.uint32(0x43E00000)
_E4M3_NORMAL_BITS = np.uint32(0x3C800000)  # 2**-6
_EXPONENT_SHIFT = np.uint32(120 << 23)  # between the exponent biases of fp32 and e4m3
_F16_ROUNDER = np.float32(0.5)  # its spacing is 2**-24, the smallest subnormal of half precision
_F16_ROUNDER_BITS = np.uint32(0x3F000000)
_F16_SHIFT = np.uint32(112 << 23)  # between the exponent biases of fp32 and half precision
_F16_NORMAL_BITS = np.uint32(0x38800000)  # 2**-14
_F16_INFINITY_BITS = np.uint32(0x47800000)  # 2**16
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_NAN_BITS = np.uint32(0x7FC00000)


@inner
def bits_of(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@inner
def float_of(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@inner
def magnitude_bits(value: Any) -> Any:
    return np.uint32(bits_of(value) & _MAGNITUDE)


@inner
def to_bf16(value: Any) -> Any:
    bits = bits_of(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(odd + np.uint32(0x7FFF))) >> np.uint32(16))


@inner
def from_bf16(bits: Any) -> Any:
    return float_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@inner
def to_f16(value: Any) -> Any:
    """Return the bits of half precision, to nearest even; those of infinity beyond its range."""
    sign = np.uint32(np.uint32(bits_of(value) >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = min(magnitude_bits(value), _F16_INFINITY_BITS)
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(np.uint32(magnitude - _F16_SHIFT) + np.uint32(odd + np.uint32(0xFFF)))
    subnormal = np.uint32(bits_of(float_of(magnitude) + _F16_ROUNDER) - _F16_ROUNDER_BITS)
    normal = np.uint32(rounded >> np.uint32(13))
    code = subnormal if magnitude < _F16_NORMAL_BITS else normal
    return np.uint16(np.uint32(code | sign))


@inner
def from_f16(bits: Any) -> Any:
    """Return the number of bits of half precision."""
    magnitude = np.uint32(np.uint32(bits) & np.uint32(0x7FFF))
    sign = np.uint32(np.uint32(np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + _F16_SHIFT)
    subnormal = bits_of(float_of(np.uint32(magnitude + _F16_ROUNDER_BITS)) - _F16_ROUNDER)
    beyond = np.uint32(normal + _F16_SHIFT)  # infinity and NaN
    found = beyond if magnitude >= np.uint32(0x7C00) else normal
    found = subnormal if magnitude < np.uint32(0x400) else found
    return float_of(np.uint32(found | sign))


@inner
def from_e4m3(code: Any) -> Any:
    magnitude = np.uint32(np.uint32(code) & np.uint32(0x7F))
    sign = np.uint32(np.uint32(np.uint32(code) & np.uint32(0x80)) << np.uint32(24))
    normal = np.uint32(np.uint32(magnitude << np.uint32(20)) + _EXPONENT_SHIFT)
    subnormal = bits_of(float_of(np.uint32(magnitude + _E4M3_ROUNDER_BITS)) - _E4M3_ROUNDER)
    bits = _NAN_BITS if magnitude == np.uint32(0x7F) else normal
    bits = subnormal if magnitude < np.uint32(8) else bits
    return float_of(np.uint32(bits | sign))


@inner
def to_e4m3(value: Any) -> Any:
    sign = np.uint32(np.uint32(bits_of(value) >> np.uint32(24)) & np.uint32(0x80))
    magnitude = min(magnitude_bits(value), _E4M3_MAX_BITS)
    odd = np.uint32(np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
    rounded = np.uint32(
        np.uint32(magnitude - _EXPONENT_SHIFT) + np.uint32(odd + np.uint32(0x7FFFF))
    )
    subnormal = np.uint32(bits_of(float_of(magnitude) + _E4M3_ROUNDER) - _E4M3_ROUNDER_BITS)
    normal = np.uint32(rounded >> np.uint32(20))
    code = subnormal if magnitude < _E4M3_NORMAL_BITS else normal
    return np.uint8(np.uint32(code | sign))


@intrinsic
def prefetch(typing: Any, source: Any, row: Any, first: Any) -> Any:
    """Fetch a row's segment from memory; beyond the source's end it does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(array.data, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        settings = [ir.Constant(number, value) for value in (0, 3, 1)]  # read, keep near, data
        at = builder.mul(arguments[1], cgutils.unpack_tuple(builder, array.strides)[0])
        size = source.dtype.bitwidth // 8
        at = builder.add(at, builder.mul(arguments[2], at.type(size)))
        for line in range(0, layouts.LANES * size, _CACHE_LINE):
            address = builder.gep(pointer, [builder.add(at, at.type(line))])
            builder.call(prefetch, [address, *settings])
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp), generate


@inner
def largest(weights: Any) -> Any:
    bits = np.uint32(0)  # non-negative floats are ordered as their bits
    for k in range(weights.size):
        bits = max(bits, magnitude_bits(weights[k]))
    return float_of(bits)


@inner
def ideal_scale(amax: Any, divisor: Any, factor: Any) -> Any:
    if amax == np.float32(0):
        return _ZERO_SCALE
    return max(np.float32(np.float32(amax / divisor) * factor), _SCALE_FLOOR)


@inner
def bf16_scale(amax: Any, divisor: Any, factor: Any) -> Any:
    return from_bf16(to_bf16(ideal_scale(amax, divisor, factor)))
