"""Causes of a tensor, behind its name, that plain text is likelier without."""

from __future__ import annotations

TRANSPOSED = "is transposed"


def ordered(clause: str) -> str:
    """clause: on the order of its rows, columns or elements."""
    return f"is not as it was trained: {clause}"


def part_times(noun: str, first: int, last: int, factor: float) -> str:
    """noun: row, column or element. factor: that of the stored weights over the right ones."""
    where = f"its {noun}s {first} to {last}"
    return f"is off in part: {where} are about {factor:.2g} times what they should be"


def adapted(rank: int) -> str:
    what = f"holds a part of rank {rank} that does harm"
    return f"{what}, as of an adapter (LoRA) that was merged into it"
