"""Stored tensors as the weights that engines look for, by the ends of their names and shapes. A
matrix that a format packs is known by its bits per element."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Protocol

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.families.base import FLOATS

CODES = ("weight_packed", "qweight")
_BITS = (2, 3, 4, 5, 6, 8)  # of a code
_OF_EXPERT = re.compile(r"\.experts\.\d+\.", re.ASCII)


class Stored(Protocol):
    """A stored tensor, as far as telling it by its shape needs it."""

    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> Sequence[int]: ...


class Wanted(Protocol):
    """A weight that engines look for, unless it is optional: the shape is that of its values."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def optional(self) -> bool: ...


def as_weight(name: str) -> str:
    """Return the name of a weight by that of the tensor with its values or codes."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last in CODES else name


def as_any_expert(name: str) -> str:
    """Return the name of a tensor with a mark in the place of its expert's number."""
    return _OF_EXPERT.sub(".experts.*.", name)


def holds(tensor: Stored, wanted: Wanted) -> bool:
    """Return whether a tensor has the shape of a weight, or as many bits as codes of it."""
    if tensor.dtype in FLOATS or tuple(tensor.shape) == tuple(wanted.shape):
        return tuple(tensor.shape) == tuple(wanted.shape)
    bits, elements = prod(tensor.shape) * tensor.dtype.bits, prod(wanted.shape)
    return len(wanted.shape) == 2 and bits in (of_code * elements for of_code in _BITS)


def last_of(name: str) -> str:
    return name.rpartition(".")[2]
