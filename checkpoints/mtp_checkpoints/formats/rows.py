"""Rows of a weight: where they are read from, and the ranges that they are read in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


def row_ranges(rows: int, step: int, chunk_rows: int = 0) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `step` rows that cover a weight, none of them in two chunks."""
    chunk = chunk_rows or rows
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        yield from ((start, min(start + step, last)) for start in range(first, last, step))


class RowSource(Protocol):
    """The tensors of one weight on disk. others are those after the codes, whole; scale is the
    first of them, with a row for the weight's rows."""

    @property
    def others(self) -> list[torch.Tensor]: ...

    @property
    def scale(self) -> torch.Tensor: ...

    @property
    def whole_codes(self) -> torch.Tensor:
        """All codes, in the shape that they are stored in."""

    def codes(self, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of the codes."""
