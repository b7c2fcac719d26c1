"""Copies of the main model's embedding and head that an MTP layer stores, compared with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

from mtp_checkpoints.formats import EncodedWeight
from mtp_checkpoints.formats.base import BLOCK
from mtp_checkpoints.weights.weight_values import PIECE_ELEMENTS, Rounding, WeightOnDisk
from mtp_runtime.loading.on_demand import read_ahead
from mtp_runtime.parallel.group import Group, Split


def is_copy(copy: WeightOnDisk, original: WeightOnDisk, readers: Executor, group: Group) -> bool:
    """Return True for equal weights, but for rounding where they are stored in two precisions.

    They are compared piece by piece, so that neither is held as a whole; each rank of the group
    compares some, and all return the same.
    """
    equal, rounding, unequal = copy.form == original.form, Rounding(), 0

    def pair(piece: tuple[int, int]) -> tuple[EncodedWeight, EncodedWeight]:
        return copy.encoded(*piece), original.encoded(*piece)

    for ours, theirs in read_ahead(readers, pair, own_pieces(copy, group.split)):
        if not equal:
            rounding.add(ours, theirs)
        elif not ours.equals(theirs):
            unequal = 1
            break
    unequal, *counts = map(int, group.totals([unequal, *rounding.counts]))
    return not unequal if equal else Rounding(*counts).is_all


def own_pieces(weight: WeightOnDisk, split: Split) -> Iterator[tuple[int, int]]:
    """Yield the pieces of a weight that a rank compares, of whole blocks."""
    blocks = split.part(-(-weight.rows // BLOCK))
    stop = min(blocks.stop * BLOCK, weight.rows)
    step = weight.piece_rows(PIECE_ELEMENTS)
    for start in range(blocks.start * BLOCK, stop, step):
        yield start, min(start + step, stop)
