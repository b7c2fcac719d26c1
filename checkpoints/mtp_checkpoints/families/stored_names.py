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
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.", re.ASCII)
_MOST_RUNS = 4  # of experts' numbers that are told


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


_GLUED = re.compile(r"(\.[a-z_]*exp(?:ert)?s?[._]?)\d+\.", re.ASCII)  # to a word for experts


def as_any_expert(name: str) -> str:
    """Return the name of a tensor with a mark in the place of its expert's number."""
    return _GLUED.sub(r"\1*.", name)


def as_experts(names: Sequence[str]) -> str:
    """Return one name for some tensors that are alike but for their experts' numbers: with those
    numbers, or how many there are."""
    if len(names) == 1:
        return names[0]
    runs = list[list[int]]()
    for number in sorted({int(found[1]) for name in names if (found := _OF_EXPERT.search(name))}):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if not 0 < len(runs) <= _MOST_RUNS:
        return f"{as_any_expert(names[0])} ({len(names):,})"
    told = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return _OF_EXPERT.sub(f".experts.{told}.", names[0])


def holds(tensor: Stored, wanted: Wanted) -> bool:
    """Return whether a tensor has the shape of a weight, or as many bits as codes of it."""
    if tensor.dtype in FLOATS or tuple(tensor.shape) == tuple(wanted.shape):
        return tuple(tensor.shape) == tuple(wanted.shape)
    bits, elements = prod(tensor.shape) * tensor.dtype.bits, prod(wanted.shape)
    return len(wanted.shape) == 2 and bits in (of_code * elements for of_code in _BITS)


def last_of(name: str) -> str:
    return name.rpartition(".")[2]
