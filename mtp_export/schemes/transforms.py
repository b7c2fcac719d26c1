"""Transforms of a plan's steps: conversion into a weight format, and transposition.

Each reads its inputs in pieces, passes on its outputs' bytes, and measures the error it makes. A
piece's size depends on the tensor alone, and errors are added up piece by piece: the bytes and the
figures are the same whatever the workers, the memory or the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.formats import UNQUANTIZED, WeightFormat
from mtp_checkpoints.formats.base import BLOCK, OF_ROWS
from mtp_checkpoints.formats.rows import row_ranges as ranges_of_rows
from mtp_checkpoints.tensors.tensor_reader import TensorReader, as_array, as_rows
from mtp_checkpoints.tensors.tensor_stream import TensorStream
from mtp_export.plan import Facts, Resources, Sink
from mtp_export.schemes.read_twice import ReadTwice, RowBytes, size_of

if TYPE_CHECKING:
    import torch

    from mtp_kernels.quantize import ErrorStats, Fp8Block
    from mtp_kernels.quantize.array_conversions import Rows

T = TypeVar("T")

_COMPILED_DTYPES = {
    (DType.F8_E4M3, DType.F32),
    (DType.BF16,),
    (DType.F16,),
    (DType.F32,),
}  # of the inputs of compiled code
_PIECE_ELEMENTS = 1 << 20
_STRIP_BYTES = 4 << 20  # of a matrix that is being transposed


@dataclass(frozen=True)
class Convert:
    """Conversion of a weight into another format.

    Inputs are the tensors of the weight in the format of its source, codes and scale; outputs are
    those of the format. scale_rule chooses the scales of groups: minmax or mse. joined is the
    number of other weights, whose tensors are the inputs after the weight's own, in its order: for
    a format with a number of the whole matrix they are measured with it.
    """

    format: WeightFormat
    scale_rule: str
    source: WeightFormat = UNQUANTIZED
    joined: int = 0

    @property
    def name(self) -> str:
        return self.format.operation_on(self.source)

    @property
    def uses_torch(self) -> bool:
        return self.source.storage not in self.format.compiled_sources

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Convert pieces of whole fp8 blocks; raises InvalidInputError for damaged values."""
        device = resources.device
        if not self.format.of_whole_matrix:
            return self._write(inputs, outputs, sink, device)
        own, *_ = measured = self._measured(inputs, resources)
        known = replace(self, format=self.format.of_amax(max(one.largest for one in measured)))
        with ExitStack() as opened:
            return known._write([one.again(opened) for one in own.rows], outputs, sink, device)

    def own(self, inputs: Sequence[T]) -> Sequence[T]:
        """Return those of its inputs that are the weight's own."""
        return inputs[: len(inputs) // (1 + self.joined)]

    def values(
        self, inputs: Sequence[RowBytes], rows: tuple[int, int], device: str
    ) -> torch.Tensor | Fp8Block:
        """Return the next rows of the weight, as they are read (ValueError for unusable scales)."""
        return self._values(row_pieces(inputs, self.source, *rows), device)

    def constants(self, shape: tuple[int, ...], outputs: int) -> Iterator[tuple[int, memoryview]]:
        """Return the bytes of those of its outputs that no element of a weight [N, K] decides, by
        number: they are the last ones."""
        constants = self.format.constants(shape)
        return enumerate(map(bytes_of, constants), outputs - len(constants))

    def _write(
        self, inputs: Sequence[RowBytes], outputs: Sequence[OutputTensor], sink: Sink, device: str
    ) -> Facts:
        errors: list[ErrorStats] = []
        weight = inputs[0].info
        of_matrix: Sequence[Any] = ()
        for start, stop in row_ranges(weight, self.source, self.format):
            with converting(weight, (start, stop)):
                results, error = self._convert(row_pieces(inputs, self.source, start, stop), device)
            errors.append(error)
            for number, result in enumerate(results[:OF_ROWS]):
                sink(number, bytes_of(result))
            of_matrix = results[OF_ROWS:]  # whichever piece: they are the same
        for number, result in enumerate(of_matrix, OF_ROWS):
            sink(number, bytes_of(result))
        for number, data in self.constants(weight.shape, len(outputs)):
            sink(number, data)
        return quality(errors)

    def _measured(self, inputs: Sequence[TensorStream], resources: Resources) -> list[Measured]:
        """Return the weight and those joined with it, measured: each once by all transforms of a
        task, in which all are kept in memory if they fit, and the own alone otherwise."""
        own, budget_bytes = self.own(inputs), resources.budget_bytes
        known = {} if resources.measured is None else resources.measured
        keeps_all = resources.measured is not None and size_of(inputs) <= budget_bytes
        result = []
        for number in range(0, len(inputs), len(own)):
            one = inputs[number : number + len(own)]
            name, keeps = one[0].info.name, number == 0 and size_of(one) <= budget_bytes
            if name not in known:
                rows = [ReadTwice(stream, keeps=keeps or keeps_all) for stream in one]
                known[name] = Measured(rows, self._largest_of(rows, resources.device))
            result.append(known[name])
        return result

    def _largest_of(self, rows: Sequence[ReadTwice], device: str) -> float:
        """Return the largest magnitude of a weight."""
        largest = 0.0
        for start, stop in row_ranges(rows[0].info, self.source):
            with converting(rows[0].info, (start, stop)):
                found = self._largest(row_pieces(rows, self.source, start, stop), device)
            largest = max(largest, found)
        return largest

    def _convert(self, pieces: Sequence[RowPiece], device: str) -> tuple[Sequence[Any], ErrorStats]:
        """Convert rows of a weight: without torch where compiled code knows them."""
        if self._is_compiled(pieces, device):
            converted = self.format.quantize_rows(_arrays(pieces), self.scale_rule)
            if converted is not None:
                return converted
        results, error = self.format.quantize(self._values(pieces, device), self.scale_rule)
        return [array_of(result.cpu()) for result in results], error

    def _largest(self, pieces: Sequence[RowPiece], device: str) -> float:
        """Return the largest magnitude of rows (ValueError for damaged ones)."""
        if self._is_compiled(pieces, device):
            from mtp_kernels.quantize.array_conversions import largest_magnitude

            found = largest_magnitude(_arrays(pieces))
            if math.isfinite(found):
                return found
        from mtp_kernels.quantize import checked_values

        return float(checked_values(self._values(pieces, device)).abs().max())

    def _is_compiled(self, pieces: Sequence[RowPiece], device: str) -> bool:
        dtypes = tuple(piece.info.dtype for piece in pieces)
        return device == "cpu" and dtypes in _COMPILED_DTYPES and not self.uses_torch

    def _values(self, pieces: Sequence[RowPiece], device: str) -> torch.Tensor | Fp8Block:
        values, *scale = (piece.tensor().to(device) for piece in pieces)
        return self.source.source(values, *scale) if scale else values


class Measured(NamedTuple):
    """Rows of a weight, to be read once more, and its largest magnitude."""

    rows: Sequence[ReadTwice]
    largest: float


class RowPiece(NamedTuple):
    """Bytes of some rows of a tensor."""

    info: TensorInfo
    data: memoryview
    rows: int

    def array(self) -> Any:
        """Return the rows as an array of the dtype's array_name."""
        return as_array(self.info, self.data, self.rows)

    def tensor(self) -> torch.Tensor:
        """Return the rows as a tensor."""
        return as_rows(self.info, self.data, self.rows)


def row_pieces(
    inputs: Sequence[RowBytes], source: WeightFormat, start: int, stop: int
) -> list[RowPiece]:
    """Return the next rows of a weight in a format, [start, stop), and those of its scales."""
    spans = ((start, stop), source.scale_span(start, stop))
    return [
        RowPiece(stream.info, stream.row_data(*span), span[1] - span[0])
        for stream, span in zip(inputs, spans, strict=False)
    ]


def _arrays(pieces: Sequence[RowPiece]) -> Rows:
    from mtp_kernels.quantize.array_conversions import rows_of

    return rows_of(*(piece.array() for piece in pieces))


def row_ranges(weight: TensorInfo, *formats: WeightFormat) -> Iterator[tuple[int, int]]:
    """Yield row ranges of whole fp8 blocks that cover a weight [N, K], which is read or written in
    some formats."""
    rows, columns = weight.shape
    step = max(1, _PIECE_ELEMENTS // (BLOCK * columns)) * BLOCK
    return ranges_of_rows(rows, step, max((one.chunk_rows for one in formats), default=0))


def quality(errors: Sequence[ErrorStats]) -> Facts:
    """Return SQNR (dB, None where nothing was lost) and maximum error of a whole tensor."""
    from mtp_kernels.quantize.layouts import sqnr_db

    signal = math.fsum(error.signal_energy for error in errors)
    level = sqnr_db(signal, math.fsum(error.error_energy for error in errors))
    return {
        "sqnr_db": level if math.isfinite(level) else None,
        "max_error": max(error.max_error for error in errors),
    }


@contextmanager
def converting(weight: TensorInfo, rows: tuple[int, int]) -> Iterator[None]:
    """Name the rows of a weight that cannot be converted (UnsupportedError where the format does
    not hold them, else InvalidInputError)."""
    try:
        yield
    except ValueError as problem:
        from mtp_kernels.quantize.layouts import OutOfRangeError

        is_sound = isinstance(problem, OutOfRangeError)
        refusal = UnsupportedError if is_sound else InvalidInputError
        raise refusal(
            f"Tensor {weight.name} cannot be converted (rows {rows[0]} to {rows[1] - 1})",
            where=weight.path,
            found=str(problem),
            todo="Choose another scheme, or another type for this tensor with --tensor-type"
            if is_sound
            else "The weight or its scale is damaged: get the checkpoint again",
        ) from problem


def load_kernels(device: str) -> None:
    """Import the kernels of conversions, which takes a second, and on a GPU torch."""
    if device == "cpu":
        import_module("mtp_kernels.quantize.array_conversions")
    else:
        from mtp_kernels.quantize import load_backend

        load_backend(device)


def array_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor, of any dtype, as an array."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def bytes_of(array: Any) -> memoryview:
    """Return the bytes of an array."""
    return memoryview(array.reshape(-1).view("uint8"))


@dataclass(frozen=True)
class Transpose:
    """Transposition of one matrix, its elements unchanged."""

    name: ClassVar[str] = "transpose"
    uses_torch: ClassVar[bool] = True

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Write output rows in panels as large as the budget.

        A tensor within the budget is read once, a larger one once per panel.
        """
        import torch

        (stream,) = inputs
        tensor = stream.info
        rows, columns = tensor.shape
        element_bytes = tensor.size_bytes // (rows * columns)
        dtype = _integer_dtype(element_bytes)
        # Three strips are alive at a time.
        strip_bytes = min(_STRIP_BYTES, resources.budget_bytes // 6)
        step = max(1, min(rows, strip_bytes // (columns * element_bytes)))
        most = max(1, (resources.budget_bytes - 3 * strip_bytes) // (rows * element_bytes))
        panel_columns = -(-columns // -(-columns // most))  # the fewest panels, of equal width
        with TensorReader(tensor) as reader:
            for first in range(0, columns, panel_columns):
                last = min(first + panel_columns, columns)
                source = reader if first else stream
                panel = torch.empty(last - first, rows, dtype=dtype)
                for row in range(0, rows, step):
                    strip = source.rows(row, min(row + step, rows)).view(dtype)[:, first:last]
                    panel[:, row : row + step] = strip.contiguous().t().contiguous()
                height = max(1, strip_bytes // (rows * element_bytes))
                for start in range(0, last - first, height):
                    sink(0, bytes_of(array_of(panel[start : start + height])))
                del panel  # before the next one is made
        return {}


def _integer_dtype(element_bytes: int) -> torch.dtype:
    """Return an integer dtype of the same width, which every torch operation supports."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[element_bytes]
