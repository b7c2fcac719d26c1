"""Sums of products of pairs of bf16 in registers: by the instruction of AVX512-BF16, or with the
same bits by two fused multiply-adds. Numbers below 2^-126 are zeros to the instruction alone."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from mtp_kernels.cpu.code import LANES, PAIRS, VECTOR, every_word, fma, widened

HAS_BF16_DOTS = bool(binding.get_host_cpu_features().get("avx512bf16", False))


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def add_pairs(builder: Any, first: Any, second: Any, total: Any) -> Any:
    """Sums plus the products of the upper bf16 of each word, then those of the lower."""
    add = by_instruction if HAS_BF16_DOTS else by_floats
    return add(builder, first, second, total)


def by_instruction(builder: Any, first: Any, second: Any, total: Any) -> Any:
    """Do so by AVX512-BF16."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _BFLOATS, _BFLOATS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    pairs = [builder.bitcast(words, _BFLOATS) for words in (first, second)]
    return builder.call(function, [total, *pairs])


def by_floats(builder: Any, first: Any, second: Any, total: Any) -> Any:
    """Do so without an instruction of its own."""
    (lower, upper), (other_lower, other_upper) = (widened(builder, w) for w in (first, second))
    return fma(builder, lower, other_lower, fma(builder, upper, other_upper, total))


def joined(builder: Any, lower: Any, upper: Any) -> Any:
    """Pairs of the numbers of two vectors of floats, each of which is a bf16."""
    low, high = (builder.bitcast(vector, PAIRS) for vector in (lower, upper))
    return lower_and_upper(builder, builder.lshr(low, every_word(16)), high)


def lower_and_upper(builder: Any, lower: Any, upper: Any) -> Any:
    """Words whose lower half is that of one, which has nothing above it, and the upper that of the
    other."""
    return builder.or_(lower, builder.and_(upper, every_word(0xFFFF0000)))
