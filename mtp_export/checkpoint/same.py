"""Holds the MTP layer's own copy of a tensor against the main model's while its bytes pass by."""

from __future__ import annotations

from collections.abc import Callable

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.tensor_reader import TensorReader, aligned_buffer
from mtp_export.errors import InvalidInputError

PIECE_BYTES = 4 << 20


def hold_against(
    own: TensorInfo, main: TensorInfo, use: Callable[[memoryview], None], buffer: memoryview
) -> None:
    """Hand on every piece of a tensor that has the same bytes as another; own and main are equal
    in size. Raises InvalidInputError at the first piece that differs."""
    spare = aligned_buffer(PIECE_BYTES)
    done = 0
    with TensorReader(own, once=True) as first, TensorReader(main, once=True) as second:
        for piece, same in zip(first.chunks(buffer), second.chunks(spare), strict=True):
            if bytes(piece) != bytes(same):
                raise InvalidInputError(
                    f"The MTP layer's {own.name} differs from the main model's {main.name}",
                    where=own.path,
                    expected="equal bytes: engines use the main model's for both",
                    found=f"a difference in the piece at byte {done}",
                    todo="Check that the MTP layer belongs to this model; --allow-untied exports"
                    " it all the same, with the layer's own copies",
                )
            use(piece)
            done += len(piece)
