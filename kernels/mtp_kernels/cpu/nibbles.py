"""Numbers of four bits in registers, of vectors of words that hold eight codes each."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

from mtp_kernels.cpu.bf16_dots import joined
from mtp_kernels.cpu.code import LANES, PAIRS, VECTOR, entries, every_word

CODES = 8  # of a word
_INT4 = [code - 16 * (code > 7) for code in range(16)]
_HALVES = [0, 1, 2, 3, 4, 6, 8, 12]  # of e2m1: two bits of exponent and one of mantissa
_E2M1 = [*_HALVES, *(-number for number in _HALVES)]

# Their upper bits as floats.
_INT4_IN_BF16 = (np.array(_INT4, np.float32).view(np.uint32) >> 16).tolist()

_BYTE, _HALF, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_REGISTER = ir.VectorType(_BYTE, 2 * LANES)  # of AVX2, which looks up in each half of it
_BYTES = ir.VectorType(_BYTE, 4 * LANES)


_HAS_FLOAT_TABLES = bool(binding.get_host_cpu_features().get("avx512f", False))
_HAS_PAIR_TABLES = bool(binding.get_host_cpu_features().get("avx512bw", False))
_HAS_BYTE_TABLES = bool(binding.get_host_cpu_features().get("avx2", False))
# What sums of e2m1 numbers are multiplied by: the table has halves, and where it is one of bytes
# they become floats in the highest bits of words.
E2M1_FACTOR = 0.5 if _HAS_FLOAT_TABLES else 2.0**-25


def int4_numbers(builder: Any, words: Any) -> list[Any]:
    """Return the integers of the codes, two's complements, of each word's lowest bits first."""
    moved = _moved(builder, words)
    if _HAS_FLOAT_TABLES:
        return [_permuted(builder, _INT4, word) for word in moved]
    top = every_word(28)
    return [builder.sitofp(builder.ashr(builder.shl(word, top), top), VECTOR) for word in moved]


def int4_bytes(builder: Any, words: Any) -> list[Any]:
    """Return the integers of the even and of the odd codes, larger by 8, as bytes of words."""
    codes, nibbles = builder.xor(words, every_word(0x88888888)), every_word(0x0F0F0F0F)
    odd = builder.lshr(codes, every_word(4))
    return [builder.and_(codes, nibbles), builder.and_(odd, nibbles)]


def int4_pairs(builder: Any, words: Any) -> list[Any]:
    """Return the integers of codes c and c + 4 of each word as pairs of bf16."""
    return (_pairs_looked_up if _HAS_PAIR_TABLES else joined_numbers)(builder, words)


def joined_numbers(builder: Any, words: Any) -> list[Any]:
    """Return the pairs of int4_pairs, without a table of pairs."""
    numbers = int4_numbers(builder, words)
    return [joined(builder, *pair) for pair in zip(numbers[:4], numbers[4:], strict=True)]


def _pairs_looked_up(builder: Any, words: Any) -> list[Any]:
    """Return the pairs of int4_pairs by a table of AVX-512."""
    kind = ir.VectorType(_HALF, 2 * LANES)
    signature = ir.FunctionType(kind, [kind, kind])
    name = "llvm.x86.avx512.permvar.hi.512"
    look_up = cgutils.get_or_insert_function(builder.module, signature, name)
    halves, pairs = builder.bitcast(words, kind), []
    for c in range(CODES // 2):
        # Five bits are looked up, of which the highest is the next code's.
        moved = builder.lshr(halves, ir.Constant(kind, [4 * c] * kind.count))
        found = builder.call(look_up, [ir.Constant(kind, _INT4_IN_BF16 * 2), moved])
        pairs.append(builder.bitcast(found, PAIRS))
    return pairs


def e2m1_numbers(builder: Any, words: Any) -> list[Any]:
    """Return the numbers of the codes over E2M1_FACTOR, of each word's lowest bits first."""
    if _HAS_FLOAT_TABLES:
        return [_permuted(builder, _E2M1, word) for word in _moved(builder, words)]
    nibbles = every_word(0x0F0F0F0F)
    parts = [builder.and_(part, nibbles) for part in (words, builder.lshr(words, every_word(4)))]
    pairs = zip(*(_numbers_of_bytes(builder, part) for part in parts), strict=True)
    return list(chain.from_iterable(pairs))


def _moved(builder: Any, words: Any) -> list[Any]:
    """Words with each of their codes in the lowest bits."""
    return [builder.lshr(words, every_word(4 * c)) if c else words for c in range(CODES)]


def _permuted(builder: Any, table: list[int], words: Any) -> Any:
    """The float of the lowest four bits of each word."""
    kind = ir.FunctionType(VECTOR, [VECTOR, PAIRS])
    name = "llvm.x86.avx512.permvar.sf.512"
    look_up = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(look_up, [ir.Constant(VECTOR, [float(n) for n in table]), words])


def _numbers_of_bytes(builder: Any, words: Any) -> list[Any]:
    """The numbers of codes that are the bytes of words."""
    look_up = shuffled if _HAS_BYTE_TABLES else compared
    halves = builder.bitcast(look_up(builder, builder.bitcast(words, _BYTES)), PAIRS)
    moved = [builder.shl(halves, every_word(24 - 8 * byte)) for byte in range(4)]
    top = every_word(0xFF000000)
    return [builder.sitofp(builder.and_(word, top), VECTOR) for word in moved]


def shuffled(builder: Any, codes: Any) -> Any:
    """Return the halves of bytes of codes, by AVX2."""
    kind = ir.FunctionType(_REGISTER, [_REGISTER, _REGISTER])
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
    table = ir.Constant(_REGISTER, _E2M1 * 2)
    starts = (0, _REGISTER.count)
    parts = [entries(builder, codes, start, _REGISTER.count) for start in starts]
    found = [builder.call(look_up, [table, part]) for part in parts]
    order = ir.Constant(ir.VectorType(_WORD, _BYTES.count), list(range(_BYTES.count)))
    return builder.shuffle_vector(*found, order)


def compared(builder: Any, codes: Any) -> Any:
    """Return the halves of bytes of codes, without instructions of their own."""
    found: Any = ir.Constant(_BYTES, None)
    for code, number in enumerate(_E2M1):
        every = [ir.Constant(_BYTES, [value] * _BYTES.count) for value in (code, number)]
        is_code = builder.icmp_unsigned("==", codes, every[0])
        found = builder.select(is_code, every[1], found)
    return found
