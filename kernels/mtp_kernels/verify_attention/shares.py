"""How threads share a batch's cached tokens: equal work each, cut at blocks of a request's tokens.

At most one request a cut is in two shares or more, as with the parts of triton_cuda.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mtp_kernels.cpu.jit import compiled
from mtp_kernels.verify_attention.tiles import TILE

BLOCK_TOKENS = 64
MAX_ROWS = 256  # rows of an item; more go in items of whole queries


class Item(NamedTuple):
    """Consecutive queries of a request. The first sees `seen` tokens, each next one more."""

    request: int
    first_query: int
    rows: int  # queries x heads
    seen: int
    tokens: int  # what the last one sees


@compiled
def items_of(cu_q: Any, kv_lens: Any, heads: Any) -> Any:
    """The batch as items [n, 5], in order of rows."""
    step = max(1, MAX_ROWS // heads)
    count = 0
    for request in range(kv_lens.size):
        count += -(-(cu_q[request + 1] - cu_q[request]) // step)
    items = np.empty((count, 5), np.int64)
    number = 0
    for request in range(kv_lens.size):
        end = np.int64(cu_q[request + 1])
        for query in range(np.int64(cu_q[request]), end, step):
            queries = min(step, end - query)
            seen = np.int64(kv_lens[request]) - (end - 1 - query)
            item = items[number]
            item[0], item[1], item[2] = request, query, queries * heads
            item[3], item[4] = seen, max(0, seen + queries - 1)
            number += 1
    return items


@compiled
def item_at(items: Any, index: Any) -> Any:
    item = items[index]
    return Item(item[0], item[1], item[2], item[3], item[4])


@compiled
def blocks_of(item: Any) -> Any:
    """An item without tokens has one block too: somebody must say that it is empty."""
    return max(1, -(-item.tokens // BLOCK_TOKENS))


@compiled
def groups_of(item: Any) -> Any:
    return -(-item.rows // TILE)


@compiled
def work_of(items: Any) -> Any:
    total = 0
    for index in range(items.shape[0]):
        item = item_at(items, index)
        total += blocks_of(item) * groups_of(item)
    return total


@compiled
def share_of(item: Any, before: Any, total: Any, number: Any, count: Any) -> tuple[Any, Any]:
    """The blocks [first, last) of an item that a thread takes; `before` it lies so much work."""
    blocks, groups = blocks_of(item), groups_of(item)
    first = -((before * count - number * total) // (groups * count))
    last = -((before * count - (number + 1) * total) // (groups * count))
    return min(blocks, max(0, first)), min(blocks, max(0, last))


@compiled
def slot_of(item: Any, first: Any, last: Any) -> Any:
    """Where a share keeps its part of an item: 0 a whole one, 1 the end of one, 2 its beginning."""
    if first > 0:
        return 1
    return 2 if last < blocks_of(item) else 0
