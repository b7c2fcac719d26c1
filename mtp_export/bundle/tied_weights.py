"""Holds the MTP layer's own copy of a tensor against the main model's while its bytes pass by."""

from __future__ import annotations

import os
from collections.abc import Callable

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_reader import TensorReader, aligned_buffer
from mtp_export.errors import InvalidInputError

PIECE_BYTES = 4 << 20


def first_difference(
    one: TensorInfo, other: TensorInfo, use: Callable[[memoryview], None], buffer: memoryview
) -> int | None:
    """Hand on a tensor's pieces as long as another of its size has the same; the offset of the byte
    where they part, else None."""
    spare = aligned_buffer(PIECE_BYTES)
    done = 0
    with TensorReader(one, once=True) as first, TensorReader(other, once=True) as second:
        for piece, same in zip(first.chunks(buffer), second.chunks(spare), strict=True):
            if (ours := bytes(piece)) != (theirs := bytes(same)):
                return done + len(os.path.commonprefix([ours, theirs]))
            use(piece)
            done += len(piece)
    return None


def hold_against(
    own: TensorInfo, main: TensorInfo, use: Callable[[memoryview], None], buffer: memoryview
) -> None:
    """Hand on every piece of an MTP tensor; InvalidInputError where the main model's differs."""
    offset = first_difference(own, main, use, buffer)
    if offset is not None:
        raise InvalidInputError(
            f"The MTP layer's {own.name} differs from the main model's {main.name}",
            where=own.path,
            expected="equal bytes: engines use the main model's for both",
            found=f"a difference at byte {offset}",
            todo="Check that the MTP layer belongs to this model; --allow-untied exports"
            " it all the same, with the layer's own copies",
        )
