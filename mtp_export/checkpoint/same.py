"""Whether two tensors hold the same bytes, without holding either."""

from __future__ import annotations

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.run import Proceed
from mtp_export.checkpoint.tensor_reader import TensorReader, aligned_buffer

_PIECE_BYTES = 4 << 20


def first_difference(one: TensorInfo, other: TensorInfo, proceed: Proceed) -> int | None:
    """Offset of the first piece in which two tensors of equal size differ, None when equal."""
    with TensorReader(one, once=True) as first, TensorReader(other, once=True) as second:
        ours = first.chunks(aligned_buffer(_PIECE_BYTES))
        theirs = second.chunks(aligned_buffer(_PIECE_BYTES))
        for number, (piece, same) in enumerate(zip(ours, theirs, strict=True)):
            proceed()
            if bytes(piece) != bytes(same):
                return number * _PIECE_BYTES
    return None
