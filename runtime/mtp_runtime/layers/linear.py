"""Linear layers over weights in any stored format, which multiply themselves as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import Protocol

import torch
import torch.nn.functional as F

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import DamagedWeight, EncodedWeight, unquantized
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_checkpoints.weights.windows import EncodedWindow
from mtp_kernels.decoder import Piece

PIECE_ELEMENTS = 1 << 22  # of a weight in files, that are read and packed at a time
PIECE_ROWS = 128  # a multiple of which a piece has: whole blocks of scales


class Weight(Protocol):
    """A matrix [out, in] in some stored format."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in] (ValueError for codes or scales that are damaged)."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T [T, out] for x [T, in], in its dtype (ValueError as dequantize)."""


@dataclass(frozen=True)
class Stacked:
    """Matrices over the same input on top of each other, each in its own format."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices as one [out, in]."""
        return torch.cat([part.dequantize(dtype) for part in self.parts])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products side by side."""
        return torch.cat([part.product(x) for part in self.parts], dim=1)


@dataclass(frozen=True)
class Windowed:
    """Some rows and columns of a matrix, of which no more than whole blocks around them is held."""

    whole: Weight
    rows: slice
    columns: slice

    @classmethod
    def of(cls, read: EncodedWindow) -> Weight:
        """Return the weight of a window; where it is all that was read, without a frame."""
        frame, (rows, columns) = read.encoded, read.window
        if read.window.shape == frame.shape:
            return frame
        return cls(frame, slice(rows.start, rows.stop), slice(columns.start, columns.stop))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in (self.rows, self.columns))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the window [out, in]."""
        return self.whole.dequantize(dtype)[self.rows, self.columns].contiguous()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ window.T."""
        around = self.columns.start, self.whole.shape[1] - self.columns.stop
        return self.whole.product(F.pad(x, around))[:, self.rows].contiguous()


@dataclass(frozen=True)
class FilePart:
    """A matrix [out, in] in files, by rows; whole: all of them are read at once.

    form: what matrices that kernels multiply as they are stored have in common; None for others.
    """

    shape: tuple[int, int]
    read: Callable[[range], Weight]
    whole: bool = False
    form: object = None

    def reads(self) -> Iterator[Callable[[], Weight]]:
        """Return what reads the matrix, some rows after the other."""
        rows, columns = self.shape
        step = rows if self.whole else max(1, PIECE_ELEMENTS // (PIECE_ROWS * columns)) * PIECE_ROWS
        return (partial(self.read, range(at, min(at + step, rows))) for at in range(0, rows, step))


@dataclass(frozen=True)
class UnreadWeight:
    """Matrices over the same input on top of each other, which stay in their files until compiled
    kernels pack them. Torch, where it runs the layer after all, expands them at the first product.
    """

    parts: tuple[FilePart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def form(self) -> object:
        """The form of all matrices, None where they have several or none."""
        forms = {part.form for part in self.parts}
        return forms.pop() if len(forms) == 1 else None

    def reads(self) -> Iterator[Callable[[], Weight]]:
        """Return what reads the matrices, some rows after the other."""
        return (read for part in self.parts for read in part.reads())

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices as one [out, in]."""
        return torch.cat([read().dequantize(dtype) for read in self.reads()])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T for x in float32."""
        return torch.mm(x, self._transposed)

    @cached_property
    def _transposed(self) -> torch.Tensor:
        return self.dequantize(torch.float32).t().contiguous()


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T for x [T, in]; the result has the dtype of x.

    `transposed` [in, out] is the weight dequantized once; without it the weight keeps its stored
    size, and every call expands it anew.
    """

    weight: Weight
    transposed: torch.Tensor | None = None

    @classmethod
    def build(cls, weight: Weight, dtype: torch.dtype, keep_dense: bool) -> Linear:
        """Make a linear layer; keep_dense dequantizes what was read now, and drops the stored form.

        Raises InvalidInputError for a damaged weight.
        """
        if not keep_dense or isinstance(weight, UnreadWeight):
            return cls(weight)
        transposed = dense(weight, dtype).t().contiguous()
        return cls(unquantized(transposed.t()), transposed)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the transposed weight [in, out], dense (InvalidInputError when damaged)."""
        return dense(self.weight, dtype).t() if self.transposed is None else self.transposed

    def pieces(self) -> Iterator[Piece]:
        """Yield some rows [n, in] of the matrix after the other, as they are stored where all have
        one form, else in float32; what is in files is read (InvalidInputError when damaged)."""
        return (read() for read in self.reads())

    def reads(self) -> Iterator[Callable[[], Piece]]:
        """Return what reads each of the pieces; any thread may."""
        if not isinstance(self.weight, UnreadWeight) or self.transposed is not None:
            return iter([lambda: self.matrix(torch.float32).t()])
        is_dense = self.weight.form is None
        return (partial(self._piece, read, is_dense) for read in self.weight.reads())

    def _piece(self, read: Callable[[], Weight], is_dense: bool) -> Piece:
        with _damage_of(self.weight):
            piece = read()
            return piece.dequantize(torch.float32) if is_dense else stored_rows(piece)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.transposed is not None:
            return torch.mm(x, self.transposed)
        with _damage_of(self.weight):
            return self.weight.product(x)

    def best(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's largest output [T], the first of equal ones."""
        return self(x).argmax(dim=-1)


def stored_rows(weight: Weight) -> Piece:
    """Return the rows of a weight that kernels multiply as it is stored (ValueError for damaged
    codes or scales)."""
    if isinstance(weight, Windowed):
        return stored_rows(weight.whole)[weight.rows]
    assert isinstance(weight, EncodedWeight), "read from files"
    codes, scale = weight.codes, weight.scale
    try:
        return codes if scale is None else weight.format.row_codes(codes, scale)
    except ValueError as error:
        raise weight.refused(error) from error


def stack(parts: Sequence[Weight]) -> Weight:
    """Return one weight for several over the same input."""
    unread = [part for part in parts if isinstance(part, UnreadWeight)]
    if len(unread) == len(parts):
        return UnreadWeight(tuple(matrix for part in unread for matrix in part.parts))
    return parts[0] if len(parts) == 1 else Stacked(tuple(parts))


def dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight dequantized to [out, in] (InvalidInputError when it is damaged)."""
    with _damage_of(weight):
        return weight.dequantize(dtype)


@contextmanager
def _damage_of(weight: Weight) -> Iterator[None]:
    """Raise InvalidInputError for a ValueError about codes or scales."""
    try:
        yield
    except DamagedWeight as error:
        path = Path(str(error.origin.path))
        is_bundle = (path.parent.parent / MANIFEST_NAME).exists()
        folder = quote(str(path.parent.parent if is_bundle else path.parent))
        raise InvalidInputError(
            f"Tensor {error.origin.name} cannot be dequantized",
            where=path,
            found=str(error),
            todo="It or its scale is damaged: get the file again, or see what is damaged and the"
            f" command that repairs it by mtp-export verify {folder} --level weights",
        ) from error
    except ValueError as error:
        raise InvalidInputError(
            f"A weight of shape {list(weight.shape)} cannot be dequantized",
            found=str(error),
            todo="The weight or its scale is damaged: get the checkpoint again",
        ) from error
