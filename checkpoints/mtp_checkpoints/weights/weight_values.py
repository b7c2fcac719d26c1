"""Stored weights as the numbers that they encode, in row pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Self

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.formats import EncodedWeight, WeightFormat
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.formats.rows import row_ranges
from mtp_checkpoints.quantization.stored import StoredModel, StoredWeight
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.tensor_reader import read_rows
from mtp_checkpoints.tensors.tensor_stream import TensorStream

if TYPE_CHECKING:
    import torch

PIECE_ELEMENTS = 1 << 20
# Of each row of a quantized copy, unless its format's own bound is less, as of four bits. Rounding
# to fp8 leaves 31 dB, another model's row less than 10.
LEAST_ROUNDED_DB = 20.0


@dataclass
class Rounding:
    """Difference of a copy in another precision from its original, piece by piece.

    Where neither is quantized, one must be the exact cast of the other: uncast and unrecast count
    the elements where the copy is not the original's, and the original not the copy's. Otherwise
    each row must be within least_db of its original: rows counts those that are not. Counts of
    pieces add up.
    """

    quantized_rows: int = 0
    uncast: int = 0
    unrecast: int = 0
    rows: int = 0
    least_db: float = LEAST_ROUNDED_DB

    def add(self, copy: EncodedWeight, original: EncodedWeight) -> None:
        """Add a piece of both."""
        ours, theirs = (weight.dequantize() for weight in (copy, original))
        if copy.scale is None and original.scale is None:
            self.uncast += _unequal(ours, theirs.to(copy.codes.dtype))
            self.unrecast += _unequal(theirs, ours.to(original.codes.dtype))
            return
        signal, noise = theirs.double(), ours.double() - theirs.double()
        power, error = (x.flatten(1).square().sum(dim=1) for x in (signal, noise))
        gates = (weight.format.gate.sqnr_db for weight in (copy, original))
        self.least_db = min(LEAST_ROUNDED_DB, *gates)
        near = error * 10 ** (self.least_db / 10) <= power
        self.quantized_rows += len(near)
        self.rows += len(near) - int(near.sum())

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Counts in the order of the fields."""
        return self.quantized_rows, self.uncast, self.unrecast, self.rows

    @property
    def is_all(self) -> bool:
        """True where rounding explains the difference."""
        return not self.rows and not min(self.uncast, self.unrecast)

    @property
    def expected(self) -> str:
        """The difference that rounding explains, in words."""
        if self.quantized_rows:
            return f"the same values, rounded: {self.least_db:.0f} dB or more in every row"
        return "the same values, cast from one dtype to the other"

    @property
    def shown(self) -> str:
        """The difference in words."""
        if self.quantized_rows:
            return f"less in {self.rows} of {self.quantized_rows} rows"
        return f"other values, {min(self.uncast, self.unrecast)} of them"


def _unequal(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Return the number of elements that differ; NaN is equal to itself."""
    differs = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    return int(differs.count_nonzero())


@dataclass(frozen=True)
class WeightOnDisk:
    """A weight of the model, and the tensors of a folder that hold it."""

    stored: StoredWeight
    tensors: tuple[TensorInfo, ...]

    @property
    def name(self) -> str:
        """Name of the tensor with the codes."""
        return self.tensors[0].name

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def has_scales(self) -> bool:
        """True where it is stored quantized: codes, and scales beside them."""
        return len(self.tensors) > 1

    @property
    def rows(self) -> int:
        return self.stored.weight.shape[0]

    @property
    def form(self) -> tuple[WeightFormat, str]:
        """Format and dtype of the codes: what weights that are compared byte by byte share."""
        return self.stored.format, self.tensors[0].dtype

    def pieces(self, elements: int = PIECE_ELEMENTS) -> Iterator[tuple[int, int]]:
        """Yield row ranges that cover the weight, of piece_rows but for the last of a chunk."""
        return row_ranges(self.rows, self.piece_rows(elements), self.stored.format.chunk_rows)

    def piece_rows(self, elements: int) -> int:
        """Return the number of rows of a piece of about this many elements: of whole fp8 blocks."""
        _, *columns = self.stored.weight.shape
        if len(columns) > 1:  # of fused experts, say, in which no format has blocks
            return max(1, elements // prod(columns))
        return max(1, elements // (BLOCK * prod(columns))) * BLOCK

    def encoded(self, start: int, stop: int) -> EncodedWeight:
        """Read rows [start, stop), start at an fp8 block's. A transposed weight is read whole."""
        return self.stored.format.encoded_rows(self, start, stop)

    def codes(self, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) of the codes."""
        if self.stored.transposed:
            return self.whole_codes.t()[start:stop]
        return read_rows(self.tensors[0], start, stop)

    @property
    def whole_codes(self) -> torch.Tensor:
        """All codes, in the shape that they are stored in; read at every access, as the others."""
        return _whole(self.tensors[0])

    @property
    def others(self) -> list[torch.Tensor]:
        """The tensors after the codes: scale and constants."""
        return [_whole(tensor) for tensor in self.tensors[1:]]

    @property
    def scale(self) -> torch.Tensor:
        """The scale, with a row for the weight's rows."""
        scale = _whole(self.tensors[1])
        return scale.t() if self.stored.transposed else scale


class WeightStream:
    """A weight's rows, once and in order, while a queue reads on; a context manager.

    others are its other tensors, scale and constants, which are small and read at once. Every
    access raises IoError when the bytes run out or cannot be read.
    """

    def __init__(self, weight: WeightOnDisk, queue: DiskQueue) -> None:
        codes, *others = weight.tensors
        self.weight = weight
        with ExitStack() as opened:
            # First, so that it reads on while the others are waited for.
            self._codes = opened.enter_context(TensorStream(codes, queue))
            self.others = [_whole(tensor) for tensor in others]
            opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._codes.__exit__(*error)

    def encoded(self, start: int, stop: int) -> EncodedWeight:
        """Return the next rows, [start, stop); they are there until others are asked for. A weight
        that is transposed, or packed along its columns, is read whole."""
        return self.weight.stored.format.encoded_rows(self, start, stop)

    def codes(self, start: int, stop: int) -> torch.Tensor:
        """Return the next rows, [start, stop), of the codes."""
        if self.weight.stored.transposed:
            return self.whole_codes.t()[start:stop]
        return self._codes.rows(start, stop)

    @property
    def scale(self) -> torch.Tensor:
        """The scale, with a row for the weight's rows."""
        return self.others[0].t() if self.weight.stored.transposed else self.others[0]

    @cached_property
    def whole_codes(self) -> torch.Tensor:
        """All codes of a weight that is read whole, in the shape that they are stored in."""
        return self._codes.rows(0, self.weight.tensors[0].shape[0])


def _whole(tensor: TensorInfo) -> torch.Tensor:
    return read_rows(tensor, 0, tensor.shape[0] if tensor.shape else 1)


def weights_on_disk(stored: StoredModel, tensors: Mapping[str, TensorInfo]) -> list[WeightOnDisk]:
    """Return the weights that can be decoded, and of which every tensor is there in the promised
    dtype and shape.

    Check files names the others.
    """
    on_disk = []
    for weight in stored.weights.values():
        if not weight.format.is_decoded:
            continue
        infos = [tensors.get(tensor.name) for tensor in weight.tensors]
        fits = all(
            info is not None and spec.fits(info)
            for info, spec in zip(infos, weight.tensors, strict=True)
        )
        if fits:
            on_disk.append(WeightOnDisk(weight, tuple(info for info in infos if info is not None)))
    return on_disk
