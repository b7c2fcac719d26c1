"""Forms of packed weights: what a panel of 32 outputs holds, and how many bytes that takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.extending import register_jitable

from mtp_kernels.cpu.code import FLOAT_BYTES, LANES

PANEL = 2 * LANES  # columns of a packed weight that one product makes
SCALE_BYTES = PANEL * FLOAT_BYTES  # of a group

# Kinds of panels. Of codes, rows [g, 32] of a group follow the group's scales [32] in float32, and
# its minimums [32] precede these where a form has some.
FLOAT32 = 0
BF16 = 1  # a row holds its two vectors entry by entry, in pairs
INT8 = 2  # two's complement; 4 rows are two vectors of words, the first row in the lowest bits
FP8 = 3  # e4m3
INT4 = 4  # two's complement; 8 rows are two vectors of words, the first row in the lowest bits
E2M1 = 5  # likewise
# Multiplied in one step: panels and groups have a multiple.
STEP_ROWS = {INT8: 4, FP8: 4, INT4: 8, E2M1: 8}
_KIND_BITS = 3
_INTEGERS = 1 << _KIND_BITS  # codes of a panel are multiplied with codes of inputs
_MINIMUMS = 2 << _KIND_BITS  # numbers are the products of codes and scales above minimums
_ROUNDED = 4 << _KIND_BITS  # inputs are rounded to bf16
_GROUP = _KIND_BITS + 3


class Panel(NamedTuple):
    """PANEL columns of a packed weight: their address, the number of rows, and their form."""

    at: Any
    count: Any
    form: Any


def form_of(
    kind: int,
    group: int = 0,
    *,
    integers: bool = False,
    minimums: bool = False,
    rounded: bool = False,
) -> int:
    """Return the form of panels of a kind; codes have scales for each group of rows.

    integers: inputs are multiplied as codes too. minimums: groups have minimums too. rounded:
    inputs are rounded to bf16.
    """
    flags = _INTEGERS * integers | _MINIMUMS * minimums | _ROUNDED * rounded
    return kind | flags | group << _GROUP


@register_jitable
def kind_of(form: int) -> int:
    """Return the kind of a form."""
    return form & ((1 << _KIND_BITS) - 1)


@register_jitable
def group_of(form: int) -> int:
    """Return the rows of codes that share a scale."""
    return form >> _GROUP


@register_jitable
def takes_codes(form: int) -> bool:
    """Return True where inputs are multiplied as codes."""
    return form & _INTEGERS != 0


@register_jitable
def takes_bf16(form: int) -> bool:
    """Return True where inputs are rounded to bf16."""
    return form & _ROUNDED != 0


@register_jitable
def has_minimums(form: int) -> bool:
    """Return True where groups have minimums."""
    return form & _MINIMUMS != 0


@register_jitable
def has_nibbles(kind: int) -> bool:
    """Return True for codes of four bits."""
    return kind >= INT4


@register_jitable
def row_bytes(kind: int) -> int:
    """Return the bytes of a row of a panel."""
    if kind == FLOAT32:
        return 4 * PANEL
    if kind == BF16:
        return 2 * PANEL
    return PANEL // 2 if has_nibbles(kind) else PANEL


@register_jitable
def head_bytes(form: int) -> int:
    """Return the bytes of a group in front of its codes: minimums, then scales."""
    return (1 + has_minimums(form)) * SCALE_BYTES


@register_jitable
def group_bytes(form: int) -> int:
    """Return the bytes of a group of codes and of what precedes them."""
    return head_bytes(form) + group_of(form) * row_bytes(kind_of(form))


@register_jitable
def panel_bytes(form: int, depth: int) -> int:
    """Return the bytes of a panel of a number of rows; the last group of codes is a whole one."""
    if kind_of(form) <= BF16:
        return depth * row_bytes(kind_of(form))
    return -(-depth // group_of(form)) * group_bytes(form)
