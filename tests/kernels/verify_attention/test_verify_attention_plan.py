"""The plan kernel: every block is dealt to one part, and no part gets more than its share."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Interpreter

TOKENS = 32


def blocks_of(q_lens: list[int], kv_lens: list[int]) -> list[int]:
    pairs = zip(q_lens, kv_lens, strict=True)
    return [max(1, -(-kv_len // TOKENS)) if q_len else 0 for q_len, kv_len in pairs]


def loads(plan: tuple[list[int], list[int], int], blocks: list[int], parts: int) -> list[int]:
    """The blocks each part works on, walking its requests as the attend kernel does."""
    starts, part_requests, share = plan
    taken = [[0] * count for count in blocks]
    result = []
    for part in range(parts):
        load, open_ends = 0, [0, 0]
        for request in range(part_requests[2 * part], part_requests[2 * part + 1]):
            first = max(part * share - starts[request], 0)
            last = min((part + 1) * share - starts[request], blocks[request])
            for block in range(first, last):
                taken[request][block] += 1
            load += max(0, last - first)
            if first < last and (first, last) != (0, blocks[request]):
                open_ends[first == 0] += 1
        assert max(open_ends) <= 1, "two slots a part are enough for partial results"
        result.append(load)
    assert all(count == 1 for request in taken for count in request)
    return result


any_plans = given(
    requests=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3000)), min_size=1, max_size=40),
    parts=st.integers(1, 60),
    min_share=st.integers(1, 6),
)


def check_plan(
    interpreter: Interpreter, requests: list[tuple[int, int]], parts: int, min_share: int
) -> None:
    q_lens, kv_lens = (list(column) for column in zip(*requests, strict=True))
    blocks = blocks_of(q_lens, kv_lens)
    plan = interpreter.plan(q_lens, kv_lens, parts, TOKENS, min_share)
    even = max(-(-sum(blocks) // parts), min_share)
    assert max(loads(plan, blocks, parts)) <= even + 4 * max(1, even // 32)


test_every_block_is_dealt_once_and_evenly = settings(max_examples=20, deadline=None)(
    any_plans(check_plan)
)
test_every_block_of_many_plans_is_dealt = pytest.mark.nightly(
    settings(max_examples=200, deadline=None)(any_plans(check_plan))
)


def test_equal_requests_that_fit_one_part_each_are_not_split(interpreter: Interpreter) -> None:
    """128 requests on 132 parts: 125 blocks per part would be even, 128 split no request."""
    _, part_requests, share = interpreter.plan([4] * 128, [4096] * 128, 132, TOKENS, 4)
    assert share == 128
    assert part_requests[:256] == [bound for part in range(128) for bound in (part, part + 1)]


def test_one_request_is_split_no_finer_than_the_smallest_share(interpreter: Interpreter) -> None:
    starts, part_requests, share = interpreter.plan([4], [1024], 132, TOKENS, 4)
    assert (starts, share) == ([0, 32], 4)
    assert part_requests == [0, 1] * 8 + [1, 1] * 124


def test_unequal_requests_begin_a_part_each_where_that_is_nearly_even(
    interpreter: Interpreter,
) -> None:
    """10, 12 and 11 blocks on 3 parts: 12 per part split no request, 11 would split two."""
    starts, part_requests, share = interpreter.plan([1] * 3, [320, 384, 352], 3, TOKENS, 1)
    assert (starts, share, part_requests) == ([0, 12, 24, 36], 12, [0, 1, 1, 2, 2, 3])
