"""Shares of a batch's cached tokens by thread: equal work each, cut at blocks of tokens.

At most one request per cut is in two shares or more, as with the parts of triton_cuda.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.matrix_units import TILE

BLOCK_TOKENS = 64
MAX_ROWS = 256  # rows of an item; more go in items of whole queries


# Consecutive queries of a request.
ITEM = np.dtype(
    [
        ("request", np.int64),
        ("first_query", np.int64),
        ("rows", np.int64),  # queries x heads
        ("seen", np.int64),  # tokens that the first query sees; each next one sees one more
        ("tokens", np.int64),  # that the last query sees
    ]
)


@compiled
def items_of(cu_q: Any, kv_lens: Any, heads: Any) -> Any:
    """Return the batch as items, in order of rows."""
    step = max(1, MAX_ROWS // heads)
    count = 0
    for request in range(kv_lens.size):
        count += -(-(cu_q[request + 1] - cu_q[request]) // step)
    items = np.empty(count, ITEM)
    number = 0
    for request in range(kv_lens.size):
        end = np.int64(cu_q[request + 1])
        for query in range(np.int64(cu_q[request]), end, step):
            queries = min(step, end - query)
            seen = np.int64(kv_lens[request]) - (end - 1 - query)
            item = items[number]
            item.request, item.first_query, item.rows = request, query, queries * heads
            item.seen, item.tokens = seen, max(0, seen + queries - 1)
            number += 1
    return items


@compiled
def blocks_of(item: Any) -> Any:
    """Return an item's blocks of tokens; one without tokens has one, which writes its zeros."""
    return max(1, -(-item.tokens // BLOCK_TOKENS))


@compiled
def groups_of(item: Any) -> Any:
    """Return an item's groups of 16 rows."""
    return -(-item.rows // TILE)


@compiled
def work_of(items: Any) -> Any:
    """Return the blocks times groups of all items."""
    total = 0
    for index in range(items.size):
        total += blocks_of(items[index]) * groups_of(items[index])
    return total


@compiled
def share_of(item: Any, before: Any, total: Any, number: Any, count: Any) -> tuple[Any, Any]:
    """Return the blocks [first, last) of an item that a thread takes; `before` is earlier work."""
    blocks, groups = blocks_of(item), groups_of(item)
    first = -((before * count - number * total) // (groups * count))
    last = -((before * count - (number + 1) * total) // (groups * count))
    return min(blocks, max(0, first)), min(blocks, max(0, last))


@compiled
def slot_of(item: Any, first: Any, last: Any) -> Any:
    """Return the place of a share's part of an item: 0 a whole one, 1 its end, 2 its beginning."""
    if first > 0:
        return 1
    return 2 if last < blocks_of(item) else 0
