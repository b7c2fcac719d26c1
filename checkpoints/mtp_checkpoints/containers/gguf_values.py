"""Typed values of a GGUF file's keys.

Source: docs/gguf.md of ggml, version 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

Scalar = bool | int | float | str


class ValueType(IntEnum):
    """Type of a value by its number in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class Value(NamedTuple):
    """Value of a key; type is that of its elements where it is an array, which data has as a
    tuple."""

    type: ValueType
    data: Scalar | tuple[Scalar, ...]
    is_array: bool = False


Keys = Mapping[str, Value]


def u16(number: int) -> Value:
    """Return a number as the keys of split files have it."""
    return Value(ValueType.UINT16, number)


def u32(number: int) -> Value:
    """Return a size, a count or a token id."""
    return Value(ValueType.UINT32, number)


def i32(number: int) -> Value:
    """Return a signed number."""
    return Value(ValueType.INT32, number)


def f32(number: float) -> Value:
    """Return a number of single precision."""
    return Value(ValueType.FLOAT32, float(number))


def boolean(flag: bool) -> Value:
    """Return true or false."""
    return Value(ValueType.BOOL, flag)


def text(words: str) -> Value:
    """Return a text."""
    return Value(ValueType.STRING, words)


def texts(words: Iterable[str]) -> Value:
    """Return an array of texts."""
    return Value(ValueType.STRING, tuple(words), is_array=True)


def i32s(numbers: Iterable[int]) -> Value:
    """Return an array of signed numbers."""
    return Value(ValueType.INT32, tuple(numbers), is_array=True)


def booleans(flags: Iterable[bool]) -> Value:
    """Return an array of flags."""
    return Value(ValueType.BOOL, tuple(flags), is_array=True)
