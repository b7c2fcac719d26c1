"""A tensor that engines look for as one, and that is there in parts: gate and up of one matrix, or
the halves of an MTP projection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_END = "_proj"


def parts_of(
    name: str, shape: Sequence[int], others: Iterable[tuple[str, Sequence[int]]]
) -> list[str]:
    """Return those of some tensors, with their shapes, that together have the rows or columns of
    one of a name and shape: of names beside it, each within its own or beginning with it. None
    where there are not several such."""
    parent, stem, last = _components(name)
    parts = {
        other: size
        for other, size in others
        if (own := _components(other))[::2] == (parent, last) and _is_part(own[1], stem)
    }
    if len(parts) < 2 or any(len(size) != len(shape) for size in parts.values()):
        return []
    for axis, length in enumerate(shape):
        rest = [*shape[:axis], *shape[axis + 1 :]]
        alike = all([*size[:axis], *size[axis + 1 :]] == rest for size in parts.values())
        if alike and sum(size[axis] for size in parts.values()) == length:
            return [*parts]
    return []


def _is_part(own: str, whole: str) -> bool:
    own, whole = own.removesuffix(_END), whole.removesuffix(_END)
    return own != whole and (own in whole or own.startswith(whole))


def _components(name: str) -> tuple[str, str, str]:
    before, _, last = name.rpartition(".")
    parent, _, stem = before.rpartition(".")
    return parent, stem, last
