"""Comparison of the MTP layer's copy of a tensor with the main model's, as its bytes are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from mtp_export.checkpoint.direct_io import aligned_buffer
from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_reader import TensorReader
from mtp_export.errors import InvalidInputError

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
        raise InvalidInputError(
            f"The MTP layer's {own.name} differs from the main model's {main.name}",
            where=own.path,
            expected="equal bytes: engines use the main model's for both",
            found=f"a difference at byte {offset}",
            todo="Check that the MTP layer belongs to this model; --allow-untied exports it"
            " nevertheless, with the layer's own copies",
        )


def compare_pairs(
    pairs: Iterable[tuple[TensorInfo, TensorInfo]], proceed: Callable[[], None]
) -> None:
    """Compare pairs of an MTP tensor and the main model's, of which nothing else is wanted."""
    buffer = aligned_buffer(PIECE_BYTES)
    for own, main in pairs:
        compare_tied(own, main, use=lambda _: proceed(), buffer=buffer)
