"""Causes of failures of weights and files of which a part is zero or not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mtp_export.progress import counted

Scales = Literal["none", "apart", "shared", "zero"]  # of the halves of a projection, or of a part
_BLIND = "Drafts see one of embedding and hidden state alone"
_FILLED = "it was never written, or dropped and filled in"
_COARSE = "it was quantized by coarser scales before"
NOT_WRITTEN = "the file of one of both was not written to its end"


def not_finite(count: int, place: str, *, huge: bool) -> str:
    """huge: some are finite, and larger than any weight is."""
    which = "NaN, infinite or huge" if huge else "NaN or infinite"
    words = f"{count:,} {which} {'value' if count == 1 else 'values'}, {place}"
    return f"{words}: memory that was never written" if huge else words


def memory(low: float, high: float) -> str:
    """low, high: between which sizes most values of a norm lie."""
    return (
        f"most of its values lie between {low:.2g} and {high:.2g} in size, as no norm's do: memory"
        " that was never written, or bytes of another dtype or tensor"
    )


def scale_never_written(tensor: str, scale: str, value: str) -> str:
    return (
        f"{scale} is {value}, so that {tensor} decodes to zero throughout: it was never written, or"
        " dropped and filled in"
    )


def not_written_to_its_end(file: str, zeros: tuple[int, int, int], first: str, tensors: int) -> str:
    """zeros: their first byte, the one behind them, and the size of the file. first: the first
    tensor that is zero as a whole."""
    start, stop, size = zeros
    to = "its end" if stop == size else f"{stop:,}"
    return (
        f"{file} is zero from byte {start:,} of {size:,} to {to}, in {counted(tensors, 'tensor')}"
        f" ({first} and those after it): a download or a write of it broke off. Write or download"
        " it again"
    )


def rows_lost(count: int, total: int) -> str:
    return f"{count:,} of its {counted(total, 'row')} are zero"


def half(tensor: str, number: int, middle: int, takes: str = "") -> str:
    """Name a half of a projection's columns. number: of the half, whose columns begin at 0 or the
    middle. takes: its input, "" where it is not known."""
    which, first = ("first", "second")[number], number * middle
    taking = f", which takes {takes}," if takes else ""
    return f"the {which} half of {tensor}'s columns ({first} to {first + middle - 1}){taking}"


def half_zeroed(half: str, scales: Scales, *, all_zero: bool) -> str:
    """half: its name, of a tensor whose halves have one scale together, each its own, or none."""
    if all_zero and scales != "shared":
        return f"{half} is zero: {_FILLED}. {_BLIND}"
    if scales == "apart":
        return f"{half} is nearly all zero: its codes were lost, or {_COARSE} them. {_BLIND}"
    coarse = (
        "rounded to zero: the halves differ in size, and a scale that both share is too coarse for"
        f" the smaller. {_BLIND}"
    )
    if scales == "shared":
        return f"{half} is {coarse}. Keep it in bf16, or give each half scales of its own"
    return f"{half} is {coarse}. It was quantized before it was stored unquantized"


def half_filled(half: str) -> str:
    """half: its name."""
    return (
        f"{half} has one value or size nearly everywhere: it, or its codes or scales,"
        f" {_FILLED.removeprefix('it ')}. {_BLIND}"
    )


def half_far_smaller(half: str, ratio: float) -> str:
    """half: its name. ratio: of the other's root mean square and its own."""
    return (
        f"{half} is {ratio:,.0f} times smaller than the other: it was multiplied by a number, or"
        f" its scales were lost. {_BLIND}"
    )


def part_zero(tensor: str, place: str, share: str, shape: Sequence[int], scales: Scales) -> str:
    """place: rows, columns or both. share: of the tensor, such as "half". scales: that it is stored
    with; zero where some are."""
    why = "that part was lost, or never written, or its scales are too coarse"
    if scales == "zero":
        why = "scales of it are zero: they were lost, or never written"
    elif scales == "none":
        why = "that part was lost, never written, or rounded to zero before it was stored"
    return f"{place} of {tensor} are zero, {share} of it ({_sized(shape)}): {why}"


def bits_lost(place: str, *, are_zero: bool, of_codes: bool) -> str:
    """place: rows or columns of a tensor, or all its values. are_zero: else of one sign. of_codes:
    bits of its codes were lost, which zero rows or columns show of packed codes alone."""
    if of_codes:
        lost = "bits of its packed codes, or its zero points, were lost, as by a mask, a cast to a"
        lost += " smaller type, or a half of each byte that was never written"
    elif are_zero:
        lost = "they were never written, or lost before it was stored, as by a mask or by codes of"
        lost += " which a half was read"
    else:
        lost = "its signs were lost before it was stored, as by codes without their zero points"
    return f"{place} are {'zero' if are_zero else 'of one sign'}: {lost}"


def part_filled(tensor: str, place: str, share: str, value: float) -> str:
    """place: elements. share: of the tensor."""
    return (
        f"{place} of {tensor} are {value:.4g}, {share} of it: that part was never written, or"
        " dropped and filled in"
    )


def _sized(shape: Sequence[int]) -> str:
    axes = ("element",) if len(shape) == 1 else ("row", "column")
    return ", ".join(map(counted, shape, axes))


def scales_all_one(tensor: str, value: float) -> str:
    return (
        f"every scale of {tensor} is {value:.4g}, and those of other linears differ: they were"
        " never written, or dropped and filled in"
    )
