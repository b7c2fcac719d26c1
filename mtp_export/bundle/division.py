"""Division of work of known sizes into equal shares, the same in every process that computes it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def divided(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the numbers of the pieces of each share, in order: the largest first, each piece goes
    to the share with the least so far."""
    loads = [(0, share) for share in range(count)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        load, share = loads[0]
        heapq.heapreplace(loads, (load + max(1, sizes[piece]), share))
        shares[share].append(piece)
    return [sorted(share) for share in shares]
