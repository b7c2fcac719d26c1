"""Comparison of the MTP layer's copy of a tensor with the main model's: byte by byte as they are
read, or of what both dequantize to where they are stored in different precisions."""

from __future__ import annotations

import os
from collections.abc import Callable

from mtp_export.checkpoint.direct_io import aligned_buffer
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_reader import TensorReader
from mtp_export.errors import InvalidInputError
from mtp_export.schemes.weight_values import LEAST_ROUNDED_DB, Rounding, WeightOnDisk

PIECE_BYTES = 4 << 20


def first_difference(
    one: TensorInfo, other: TensorInfo, use: Callable[[memoryview], None], buffer: memoryview
) -> int | None:
    """Return the offset of the first byte in which two tensors of one size differ; None if none.

    use is given every piece of the first tensor before the difference; pieces lie in the buffer.
    """
    second_buffer = aligned_buffer(PIECE_BYTES)
    done = 0
    with TensorReader(one, once=True) as first, TensorReader(other, once=True) as second:
        pairs = zip(first.chunks(buffer), second.chunks(second_buffer), strict=True)
        for piece, other_piece in pairs:
            if (ours := bytes(piece)) != (theirs := bytes(other_piece)):
                return done + len(os.path.commonprefix([ours, theirs]))
            use(piece)
            done += len(piece)
    return None


def compare_tied(
    own: TensorInfo, main: TensorInfo, use: Callable[[memoryview], None], buffer: memoryview
) -> None:
    """Give use every piece of an MTP tensor (InvalidInputError where the main model's differs)."""
    offset = first_difference(own, main, use=use, buffer=buffer)
    if offset is not None:
        raise _untied(own, main, "equal bytes", f"a difference at byte {offset}")


def compare_dequantized(
    own: WeightOnDisk, main: WeightOnDisk, use: Callable[[], None] = lambda: None
) -> None:
    """Compare a copy in another precision with the main model's (InvalidInputError where it is no
    rounding of it); use is called after every piece."""
    rounding = Rounding()
    for start, stop in own.pieces():
        copy, original = (one.encoded(start, stop).dequantize() for one in (own, main))
        rounding.add(copy, original)
        use()
    if not rounding.is_all:
        expected = f"{own.stored.storage} of the same values, {LEAST_ROUNDED_DB:.0f} dB or more"
        raise _untied(own.tensors[0], main.tensors[0], expected, rounding.shown)


def _untied(own: TensorInfo, main: TensorInfo, expected: str, found: str) -> InvalidInputError:
    return InvalidInputError(
        f"The MTP layer's {own.name} differs from the main model's {main.name}",
        where=own.path,
        expected=f"{expected}: engines use the main model's for both",
        found=found,
        todo="Check that the MTP layer belongs to this model; --allow-untied exports it"
        " nevertheless, with the layer's own copies",
    )
