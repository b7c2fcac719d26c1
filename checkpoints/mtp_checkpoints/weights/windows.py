"""Windows of stored weights: some rows and columns, read without the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.formats import EncodedWeight, WeightFormat
from mtp_checkpoints.weights.weight_values import WeightOnDisk

if TYPE_CHECKING:
    import torch

# Reads rows and columns of a tensor on disk; vectors and scalars have rows alone.
Read = Callable[[TensorInfo, range, range | None], "torch.Tensor"]


class Window(NamedTuple):
    """Rows and columns of a weight [N, K], consecutive ones of either."""

    rows: range
    columns: range

    @classmethod
    def of(
        cls, shape: Sequence[int], rows: range | None = None, columns: range | None = None
    ) -> Self:
        """Return a window that is whole where nothing is given."""
        whole = [range(size) for size in (*shape, 1)]
        return cls(whole[0] if rows is None else rows, whole[1] if columns is None else columns)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    def moved(self, row: int, column: int) -> Self:
        """Return a window of this size that begins elsewhere."""
        rows, columns = self.shape
        return type(self)(range(row, row + rows), range(column, column + columns))


@dataclass(frozen=True)
class EncodedWindow:
    """A window of a weight inside an encoded one, which begins where its scales and its words do:
    rows and columns before and behind it may be zeros that were not read."""

    encoded: EncodedWeight
    window: Window  # of encoded


class _Span(NamedTuple):
    """Entries that are read of a dimension of a tensor, and zeros before and behind them."""

    read: range
    before: int = 0
    behind: int = 0


def has_whole_units(weight_format: WeightFormat, columns: range, size: int) -> bool:
    """Return True for columns, of so many, that share no scale and no word with others."""
    unit = _units(weight_format)[1]
    return columns.start % unit == 0 and (columns.stop % unit == 0 or columns.stop == size)


def encoded_window(weight: WeightOnDisk, window: Window, read: Read) -> EncodedWindow:
    """Read a window of a matrix, with its scales."""
    stored, shape = weight.stored, weight.stored.weight.shape
    if stored.format.is_one_row:
        return EncodedWindow(stored.encoded([_whole(one, read) for one in weight.tensors]), window)
    if stored.format.word_rows:
        return _of_words(weight, window, read)
    codes, *others = weight.tensors
    spans = _code_spans(stored.format, window, shape)
    tensors = [_placed(codes, spans, read, transposed=stored.transposed)]
    for number, tensor in enumerate(others):
        if number == 0 and len(tensor.shape) == 2:
            cut = _scale_spans(stored.format, window, _sizes(tensor, stored.transposed))
            tensors.append(_placed(tensor, cut, read, transposed=stored.transposed))
        else:
            tensors.append(_whole(tensor, read))
    start = window.columns.start
    first = (spans[0].before, start - _floor(start, _units(stored.format)[1]))
    return EncodedWindow(stored.encoded(tensors), window.moved(*first))


def _of_words(weight: WeightOnDisk, window: Window, read: Read) -> EncodedWindow:
    """Read the words and groups that a window lies in."""
    stored, shape = weight.stored, weight.stored.weight.shape
    rows = _widened(window.rows, stored.format.word_rows, shape[0])
    columns = _widened(window.columns, stored.format.k_divisor, shape[1])
    places = stored.format.places(rows, columns, shape)
    tensors = [read(tensor, *place) for tensor, place in zip(weight.tensors, places, strict=True)]
    first = (window.rows.start - rows.start, window.columns.start - columns.start)
    return EncodedWindow(stored.encoded(tensors), window.moved(*first))


def _units(weight_format: WeightFormat) -> tuple[int, int]:
    """Return rows and columns that share a scale, or a word of codes."""
    rows = weight_format.scale_rows
    return rows, max(rows, weight_format.k_divisor)


def _code_spans(
    weight_format: WeightFormat, window: Window, shape: Sequence[int]
) -> tuple[_Span, _Span]:
    """Return the codes to read, and the zeros that fill the first and the last unit."""
    unit_rows, unit = _units(weight_format)
    packed = weight_format.elements_per_code
    rows = _Span(window.rows, before=window.rows.start % unit_rows)
    start, stop = window.columns.start, window.columns.stop
    read = range(start // packed, -(-stop // packed))
    before = read.start - _floor(start, unit) // packed
    # Ragged blocks may end anywhere, groups may not.
    end = stop if weight_format.k_divisor == 1 else min(_floor(stop + unit - 1, unit), shape[1])
    return rows, _Span(read, before=before, behind=-(-end // packed) - read.stop)


def _scale_spans(
    weight_format: WeightFormat, window: Window, sizes: Sequence[int]
) -> tuple[_Span, _Span]:
    """Return the scales [n, k] of a window; those of whole rows or of the matrix are one."""
    spans = []
    for part, unit, size in zip(window, _units(weight_format), sizes, strict=True):
        cut = range(part.start // unit, -(-part.stop // unit))
        spans.append(_Span(cut if size > 1 else range(size)))
    return spans[0], spans[1]


def _sizes(tensor: TensorInfo, transposed: bool) -> tuple[int, ...]:
    return tensor.shape[::-1] if transposed else tensor.shape


def _placed(
    tensor: TensorInfo, spans: tuple[_Span, _Span], read: Read, *, transposed: bool
) -> torch.Tensor:
    """Read a part of a tensor, and put it between zeros."""
    from torch.nn.functional import pad

    if len(tensor.shape) != 2:
        return read(tensor, spans[0].read, None)
    rows, columns = spans[::-1] if transposed else spans
    part = read(tensor, rows.read, columns.read)
    edges = (columns.before, columns.behind, rows.before, rows.behind)
    if not any(edges):
        return part
    import torch

    # Not every dtype can be padded, but every one has bytes.
    size = part.element_size()
    wide = part.contiguous().view(torch.uint8)
    return pad(wide, (size * edges[0], size * edges[1], *edges[2:])).view(part.dtype)


def _whole(tensor: TensorInfo, read: Read) -> torch.Tensor:
    """Read a vector or a number, such as a constant."""
    return read(tensor, range(tensor.shape[0] if tensor.shape else 1), None)


def _widened(part: range, unit: int, size: int) -> range:
    """Return the whole units that a part of [0, size) lies in."""
    return range(_floor(part.start, unit), min(_floor(part.stop + unit - 1, unit), size))


def _floor(number: int, unit: int) -> int:
    return number - number % unit
