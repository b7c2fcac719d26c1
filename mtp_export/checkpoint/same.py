"""Whether two tensors hold the same bytes, without holding either."""

from __future__ import annotations

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.reader import TensorReader
from mtp_export.checkpoint.run import Proceed

_PIECE_BYTES = 1 << 20


def first_difference(one: TensorInfo, other: TensorInfo, proceed: Proceed) -> int | None:
    """Offset of the first piece in which two tensors of equal size differ, None when equal."""
    ours, theirs = bytearray(_PIECE_BYTES), bytearray(_PIECE_BYTES)
    with TensorReader(one) as first, TensorReader(other) as second:
        pairs = zip(first.chunks(memoryview(ours)), second.chunks(memoryview(theirs)), strict=True)
        for number, (piece, _) in enumerate(pairs):
            proceed()
            if ours[: len(piece)] != theirs[: len(piece)]:
                return number * _PIECE_BYTES
    return None
