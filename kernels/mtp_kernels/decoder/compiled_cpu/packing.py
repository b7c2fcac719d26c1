"""Packing of matrices for compiled code: panels of 32 outputs, one copy, filled row by row as a
matrix is read.

What is stored as codes or bf16 stays so; other matrices are kept in float32 or bf16, but for
routers, whose choices depend on every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import torch

from mtp_kernels.cpu.code import LANES
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.panel_forms import (
    BF16,
    E2M1,
    FLOAT32,
    FP8,
    INT4,
    INT8,
    PANEL,
    STEP_ROWS,
    form_of,
    group_of,
    head_bytes,
    kind_of,
    panel_bytes,
)
from mtp_kernels.cpu.team import process_team, share
from mtp_kernels.decoder import Matrix, Piece, pieces_of
from mtp_kernels.decoder.compiled_cpu.rows import panels_of
from mtp_kernels.quantize.row_codes import RowCodes

# Kinds of panels by the dtype of what they hold.
FLOATS = {torch.float32: FLOAT32, torch.bfloat16: BF16}
_CODES = {torch.int8: INT8, torch.float8_e4m3fn: FP8, torch.int32: INT4, torch.uint8: E2M1}
_WORDS = {
    INT4: np.int32,
    INT8: np.int32,
    E2M1: np.int32,
}  # in which codes are moved; others as bytes
_BLOCK_WORDS = 64  # of each row that are moved together: their columns stay in cache
_MOVE_COST = 4  # multiplications that take as long as to move a word


@dataclass(frozen=True)
class PackedMatrix:
    """Panels [..., bytes] of matrices, side by side, and their form."""

    panels: np.ndarray
    form: int


@dataclass(frozen=True)
class PackedTransposes:
    """Transposes [h, in, out] of matrices, and what their inputs are multiplied with first: scales
    [h, groups, 1 or 2, out], each of `group` rows of the transpose, behind what products with the
    inputs are added to those rows; none where group is 0."""

    matrix: PackedMatrix
    scales: np.ndarray
    group: int

    @property
    def minimums(self) -> int:
        """Vectors in front of the scales of a group, 0 or 1."""
        return int(self.scales.shape[2]) - 1


@dataclass(frozen=True)
class PackedStack:
    """Matrices, each of a form of its own: their panels, and a table [e, 2] of addresses and forms
    that compiled code is given."""

    panels: tuple[np.ndarray, ...]
    table: np.ndarray


@dataclass(frozen=True)
class Packer:
    """Packs matrices side by side into an arena; those that are float32 in a dtype, float32 or bf16
    (rounded to nearest). Where the arena is filled, matrices are found there, and none is read.

    activations: what stored matrices are multiplied with: float32, bf16 those of int8, int4, fp8
    and bf16, int8 those of int8 and int4.
    """

    arena: Arena
    dtype: torch.dtype
    activations: torch.dtype = torch.float32

    def matrix(self, matrix: Matrix) -> PackedMatrix:
        """Return [..., out, in] as panels [..., out / 32, bytes], zeros past the last output."""
        *several, rows, columns = matrix.shape
        form, pieces = self._form(columns, pieces_of(matrix))
        size = panel_bytes(form, columns)
        place = self.arena.take(*several, panels_of(rows), size, dtype=np.uint8)
        self._fill([*place.reshape(-1, *place.shape[-2:])], form, rows, pieces)
        return PackedMatrix(place, form)

    def transposes(self, matrix: Matrix) -> PackedTransposes:
        """Return the transposes of matrices [h, out, in].

        Codes have scales for their rows, which are the inputs of the transpose: each input is
        multiplied by them, and no scale is left to the sums.
        """
        heads, outputs, columns = matrix.shape
        shape = heads, columns, outputs
        if self.arena.is_filled:
            made = _Transposes((), torch.empty(0, 0, 1, 0), 0)
        else:
            made = _Transposes.of(matrix)
        packed = self.matrix(_InMemory(shape, made.rows))
        group, *sizes = map(self.arena.noted, (made.group, *made.scales.shape))
        return PackedTransposes(packed, self._copied(sizes, made.scales), group)

    def stack(self, matrix: Matrix, parts: int = 1) -> PackedStack:
        """Return matrices [e, out, in] as panels [out / parts / 32, parts, bytes]: panels of all
        parts of the outputs, as of gate and up, in turn."""
        number, outputs, columns = matrix.shape
        rows, pieces = outputs // parts, _cut(pieces_of(matrix), outputs)
        made = []
        for _ in range(number):
            form, own = self._form(columns, _first(pieces, outputs))
            size = panel_bytes(form, columns)
            place = self.arena.take(panels_of(rows), parts, size, dtype=np.uint8)
            self._fill([place[:, part] for part in range(parts)], form, rows, own)
            made.append((place, form))
        if not self.arena.is_filled and next(pieces, None) is not None:
            raise ValueError(f"matrix: expected {number * outputs} rows, found more")
        table = np.array([(place.ctypes.data, form) for place, form in made], np.int64)
        return PackedStack(tuple(place for place, _ in made), table.reshape(-1, 2))

    def vector(self, values: torch.Tensor) -> np.ndarray:
        """Return a copy of a vector, in float32."""
        return self._copied(values.shape, values)

    def _copied(self, shape: Sequence[int], values: torch.Tensor) -> np.ndarray:
        place = self.arena.take(*shape)
        if not self.arena.is_filled:
            place[...] = values.numpy()
        return place

    def _form(self, columns: int, pieces: Iterator[Piece]) -> tuple[int, Iterator[Piece]]:
        """Return the form that rows are kept in, and the rows."""
        if self.arena.is_filled:
            return self.arena.noted(0), iter(())
        form, pieces = self._form_of(columns, pieces)
        return self.arena.noted(form), pieces

    @property
    def _rounds(self) -> bool:
        return self.activations is torch.bfloat16

    def _form_of(self, columns: int, pieces: Iterator[Piece]) -> tuple[int, Iterator[Piece]]:
        first = next(pieces, None)
        if first is None:
            return self._float_form(FLOATS[self.dtype], columns), iter(())
        pieces = chain([first], pieces)
        if isinstance(first, RowCodes):
            kind = _CODES[first.codes.dtype]
            above = first.minimum is not None  # whose products are made of float32 alone
            step = LANES if above else STEP_ROWS[kind]
            if columns % step == 0 == first.group % step:
                integers = self.activations is torch.int8 and kind in (INT8, INT4) and not above
                rounded = self._rounds and kind in (INT8, INT4, FP8) and not above
                form = form_of(
                    kind, first.group, integers=integers, minimums=above, rounded=rounded
                )
                return form, pieces
            pieces = map(_dense, pieces)
        elif first.dtype is torch.bfloat16:
            return self._float_form(BF16, columns), pieces
        return self._float_form(FLOATS[self.dtype], columns), pieces

    def _float_form(self, kind: int, columns: int) -> int:
        return form_of(kind, rounded=self._rounds and kind == BF16 and columns % 2 == 0)

    def _fill(
        self, places: Sequence[np.ndarray], form: int, rows: int, pieces: Iterator[Piece]
    ) -> None:
        """Write matrices of a number of rows, as they are read, to the panels of each."""
        if self.arena.is_filled:
            return
        for panels in places if rows % PANEL else ():
            panels[-1] = 0
        at, end = 0, rows * len(places)
        for piece in pieces:
            while len(piece) and at < end:
                number, start = divmod(at, rows)
                part, piece = piece[: rows - start], piece[rows - start :]
                _write(places[number], form, start, part)
                at += len(part)
            at += len(piece)
        if at != end:
            raise ValueError(f"matrix: expected {end} rows, found {at}")


@dataclass(frozen=True)
class _InMemory:
    """Matrices [..., out, in] whose rows are there, in pieces."""

    shape: tuple[int, ...]
    rows: Sequence[Piece]

    def pieces(self) -> Iterator[Piece]:
        return iter(self.rows)


@dataclass(frozen=True)
class _Transposes:
    """Transposes of matrices: their rows [in, out], one matrix after the other, and the scales and
    group of PackedTransposes."""

    rows: Sequence[Piece]
    scales: torch.Tensor
    group: int

    @classmethod
    def of(cls, matrix: Matrix) -> _Transposes:
        """Read matrices [h, out, in]."""
        heads, outputs, _ = matrix.shape
        pieces = _cut(pieces_of(matrix), outputs)
        each = [_joined(_first(pieces, outputs)) for _ in range(heads)]
        codes = [one for one in each if _can_transpose(one)]
        if len(codes) < heads:
            return cls([_dense(rows).t() for rows in each], torch.empty(0, 0, 1, 0), 0)
        scales = torch.stack([one.of_groups.permute(1, 2, 0) for one in codes])
        return cls([_unscaled(one.numbers().t()) for one in codes], scales, codes[0].group)


def _can_transpose(rows: Piece) -> TypeGuard[RowCodes]:
    """Return True for codes whose transpose has whole steps; one of 4 bits becomes one of 8."""
    return isinstance(rows, RowCodes) and len(rows) % max(STEP_ROWS[INT8], STEP_ROWS[FP8]) == 0


def _unscaled(codes: torch.Tensor) -> RowCodes:
    """Return rows of codes that stand for the numbers themselves."""
    return RowCodes(codes, torch.ones(len(codes), 1), codes.shape[1])


def _joined(pieces: Iterator[Piece]) -> Piece:
    """Return the pieces of one matrix as one."""
    parts = list(pieces)
    if len(parts) == 1:
        return parts[0]
    codes = [part for part in parts if isinstance(part, RowCodes)]
    if not codes:
        return torch.cat([_dense(part) for part in parts])
    minimums = [part.minimum for part in codes if part.minimum is not None]
    return replace(
        codes[0],
        codes=torch.cat([part.codes for part in codes]),
        scale=torch.cat([part.scale for part in codes]),
        minimum=torch.cat(minimums) if minimums else None,
    )


def _dense(piece: Piece) -> torch.Tensor:
    return piece.values() if isinstance(piece, RowCodes) else piece


def _cut(pieces: Iterator[Piece], rows: int) -> Iterator[Piece]:
    """Yield pieces that end where matrices of a number of rows do."""
    at = 0
    for piece in pieces:
        while len(piece):
            part, piece = piece[: rows - at % rows], piece[rows - at % rows :]
            at += len(part)
            yield part


def _first(pieces: Iterator[Piece], rows: int) -> Iterator[Piece]:
    """Yield the pieces of the next matrix."""
    while rows > 0 and (piece := next(pieces, None)) is not None:
        rows -= len(piece)
        yield piece


def _write(panels: np.ndarray, form: int, start: int, rows: Piece) -> None:
    """Write rows of a matrix, from one on, to its panels."""
    if isinstance(rows, RowCodes):
        _write_codes(panels, form, start, rows)
    else:
        _write_floats(panels, form, start, rows)


def _write_floats(panels: np.ndarray, form: int, start: int, rows: torch.Tensor) -> None:
    """Write rows [n, in] to panels [panel, in, 32]: as columns."""
    paired = kind_of(form) == BF16
    rows = rows.bfloat16().contiguous() if paired else rows.contiguous()
    words = rows.view(torch.int16 if paired else torch.int32).numpy()
    lines = panels.view(words.dtype).reshape(len(panels), 1, -1)
    none = np.empty((len(rows), 0, 0), np.float32)
    _move(words, 0, none, start, paired, lines, np.empty((len(panels), 0, 0), np.float32))


def _write_codes(panels: np.ndarray, form: int, start: int, rows: RowCodes) -> None:
    """Write rows of codes: of each group the minimums, if there are some, the scales, and the
    codes, all as columns."""
    if rows.group != group_of(form) or _CODES[rows.codes.dtype] != kind_of(form):
        raise ValueError("matrix: expected rows in one form, found several")
    word = np.dtype(_WORDS.get(kind_of(form), np.uint8))
    words = rows.codes.contiguous().view(torch.uint8).numpy().view(word)
    numbers = rows.of_groups.numpy()
    scales = panels.view(np.float32).reshape(len(panels), numbers.shape[1], -1)
    lines = panels.view(word).reshape(len(panels), numbers.shape[1], -1)
    lines = lines[..., head_bytes(form) // word.itemsize :]
    _move(words, rows.flip, numbers, start, False, lines, scales)


def _move(words: np.ndarray, flip: int, *arguments: Any) -> None:
    """Run write_columns; flip: of each byte."""
    team, size = process_team(), words.dtype.itemsize
    threads = team.threads_for(words.size * _MOVE_COST)
    bits = np.frombuffer(bytes([flip]) * size, words.dtype)[0]
    team.run(write_columns, threads, words, bits, *arguments)


@compiled
def write_columns(
    member: Any,
    words: Any,
    flip: Any,
    scale: Any,
    start: Any,
    paired: Any,
    lines: Any,
    scales: Any,
) -> None:
    """Write words [n, in] and scale [n, groups, m], from row `start` on, to the columns of lines
    [panels, groups, 32 * words of a group] and scales [panels, groups, >= 32 * m].

    flip: bits that are turned over in every word. paired: a line holds its two vectors entry by
    entry.
    """
    first_panel, stop, most = start // PANEL, start + words.shape[0], lines.shape[2] // PANEL
    first, last = share(member, -(-stop // PANEL) - first_panel)
    for panel in range(first_panel + first, first_panel + last):
        low, high = max(start, panel * PANEL), min(stop, (panel + 1) * PANEL)
        for group in range(scale.shape[1]):
            for row in range(low, high):
                for number in range(scale.shape[2]):
                    place = number * PANEL + row - panel * PANEL
                    scales[panel, group, place] = scale[row - start, group, number]
        for group in range(lines.shape[1]):
            line, left = lines[panel, group], group * most
            right = min(left + most, words.shape[1])
            for begin in range(left, right, _BLOCK_WORDS):
                end = min(begin + _BLOCK_WORDS, right)
                for row in range(low, high):
                    lane = row - panel * PANEL
                    if paired:
                        lane = lane % LANES * 2 + lane // LANES
                    source = words[row - start]
                    for word in range(begin, end):
                        line[(word - left) * PANEL + lane] = source[word] ^ flip
