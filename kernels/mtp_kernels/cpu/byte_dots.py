"""Sums of products of unsigned bytes with signed ones, four to a word, in registers: exact, by the
instructions that the CPU has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from mtp_kernels.cpu.code import LANES, PAIRS, entries, every_word

_BYTE, _HALF = ir.IntType(8), ir.IntType(16)
_BYTES, _HALVES = ir.VectorType(_BYTE, 4 * LANES), ir.VectorType(_HALF, 2 * LANES)
_FEATURES = binding.get_host_cpu_features()
_TAKES_BYTES = (22, 0, 0)  # LLVM whose dot product takes bytes; before, words

HAS_DOTS = bool(_FEATURES.get("avx512vnni", False))
_HAS_AVX2 = bool(_FEATURES.get("avx2", False))


def add_dots(
    builder: Any, total: Any, unsigned: list[Any], signed: list[Any], *, small: bool
) -> Any:
    """Return total [16] + the sums of products of four bytes of each word, of all pairs of vectors.

    small: unsigned bytes are below 16, and pairs of vectors eight at most, so that 16 bits hold
    sums of two products.
    """
    if HAS_DOTS:
        add = _dot
    elif _HAS_AVX2 and small:
        return small_dots(builder, total, unsigned, signed)
    else:
        add = even_and_odd_dot if _HAS_AVX2 else plain_dot
    for pair in zip(unsigned, signed, strict=True):
        total = add(builder, total, *pair)
    return total


def _dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    taken = _BYTES if binding.llvm_version_info >= _TAKES_BYTES else PAIRS
    kind = ir.FunctionType(PAIRS, [PAIRS, taken, taken])
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    given = [builder.bitcast(vector, taken) for vector in (unsigned, signed)]
    return builder.call(function, [total, *given])


def small_dots(builder: Any, total: Any, unsigned: list[Any], signed: list[Any]) -> Any:
    """add_dots of small bytes by AVX2: products are added in pairs of 16 bits first."""
    sums = None
    for pair in zip(unsigned, signed, strict=True):
        given = [builder.bitcast(vector, _BYTES) for vector in pair]
        made = _by_registers(builder, "llvm.x86.avx2.pmadd.ub.sw", given, _HALF)
        sums = made if sums is None else builder.add(sums, made)
    ones = ir.Constant(_HALVES, [1] * _HALVES.count)
    return builder.add(total, _added_pairs(builder, sums, ones))


def even_and_odd_dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """One pair's part of add_dots by AVX2: even bytes and odd ones as 16 bits each."""
    eight, mask = ir.Constant(_HALVES, [8] * _HALVES.count), every_word(0x00FF00FF)
    words = builder.bitcast(signed, _HALVES)
    moved = builder.shl(words, eight)
    for shifted, other in ((unsigned, moved), (builder.lshr(unsigned, every_word(8)), words)):
        first = builder.bitcast(builder.and_(shifted, mask), _HALVES)
        total = builder.add(total, _added_pairs(builder, first, builder.ashr(other, eight)))
    return total


def _added_pairs(builder: Any, first: Any, second: Any) -> Any:
    """Products of 16 bits, two added to each word."""
    return _by_registers(builder, "llvm.x86.avx2.pmadd.wd", [first, second], ir.IntType(32))


def _by_registers(builder: Any, name: str, given: list[Any], element: Any) -> Any:
    """A function of two registers of AVX2 by both halves of vectors; `element` is its result's."""
    size = given[0].type.count // 2
    taken = ir.VectorType(given[0].type.element, size)
    made = ir.VectorType(element, 32 * LANES // element.width // 2)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(made, [taken, taken]), name
    )
    parts = [
        builder.call(function, [entries(builder, vector, start, size) for vector in given])
        for start in (0, size)
    ]
    order = list(range(2 * made.count))
    return builder.shuffle_vector(
        *parts, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    )


def plain_dot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """One pair's part of add_dots without instructions of its own."""
    for byte in range(4):
        left = builder.and_(builder.lshr(unsigned, every_word(8 * byte)), every_word(0xFF))
        right = builder.ashr(builder.shl(signed, every_word(24 - 8 * byte)), every_word(24))
        total = builder.add(total, builder.mul(left, right))
    return total
