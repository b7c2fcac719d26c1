"""Whether two tensors hold the same bytes, without holding either."""

from __future__ import annotations

from mtp_export.checkpoint.header import TensorInfo
from mtp_export.checkpoint.reader import read_into
from mtp_export.checkpoint.run import Proceed

_PIECE_BYTES = 1 << 20


def first_difference(one: TensorInfo, other: TensorInfo, proceed: Proceed) -> int | None:
    """Offset of the first piece in which two tensors of equal size differ, None when equal."""
    ours, theirs = bytearray(_PIECE_BYTES), bytearray(_PIECE_BYTES)
    for offset in range(0, one.size_bytes, _PIECE_BYTES):
        proceed()
        size = min(_PIECE_BYTES, one.size_bytes - offset)
        read_into(one, memoryview(ours)[:size], offset)
        read_into(other, memoryview(theirs)[:size], offset)
        if ours[:size] != theirs[:size]:
            return offset
    return None
