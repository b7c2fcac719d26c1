"""The Triton backend over the whole matrix, in Triton's interpreter on the CPU.

float32 and float16 only. Triton's interpreter (3.6 to 3.9) keeps bfloat16 as uint16, and its
tl.dot multiplies those bit patterns as integers; the backend refuses bf16 there, and a test holds
that it does. bf16 is covered by the compile tests and, on a GPU, by the device tests.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import Case, check, lengths_around, reordered
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import Interpreter

from cases import nightly_but

FLOAT32, FLOAT16 = torch.float32, torch.float16
MIXED = Case((2, 0, 6, 3, 1, 5), (0, 9, 3, 200, 129, 64), heads=17, latent=512, rope=64, page=64)
PARTS = ONE_PART, SOME_PARTS, MORE_PARTS_THAN_BLOCKS = 1, 5, 64
KINDS = ((FLOAT32, False), (FLOAT16, False), (FLOAT16, True))


def check_all(interpreter: Interpreter, cases: list[Case]) -> None:
    for case, (out, lse) in zip(cases, interpreter.attend(cases), strict=True):
        check(case, out, lse)


# The interpreter takes seconds per program: with every push one of each kind of tile, and each
# number of parts with one of them; nightly all with all.
@pytest.mark.parametrize(
    ("q_len", "heads", "parts"),
    nightly_but(
        [(1, 16, SOME_PARTS), (2, 8, ONE_PART), (4, 1, MORE_PARTS_THAN_BLOCKS), (6, 1, SOME_PARTS)],
        product(range(1, 7), (1, 8, 16, 17), PARTS),
    ),
)
def test_every_length_around_an_edge(
    interpreter: Interpreter, q_len: int, heads: int, parts: int
) -> None:
    lengths = lengths_around(q_len, page=16)
    case = Case((q_len,) * len(lengths), lengths, heads=heads, parts=parts)
    check_all(interpreter, [case])


@pytest.mark.parametrize(
    ("q_len", "every_length"), nightly_but([(1, False)], product(range(1, 7), (False, True)))
)
def test_128_heads_in_tiles_of_64_rows(
    interpreter: Interpreter, q_len: int, every_length: bool
) -> None:
    lengths = lengths_around(q_len, page=16) if every_length else (0, q_len, 65)
    whole = Case((q_len,) * len(lengths), lengths, heads=128, dtype=FLOAT16, parts=ONE_PART)
    split = replace(whole, q_lens=(q_len,) * 2, kv_lens=(65, 32 + q_len))
    parts = (SOME_PARTS, MORE_PARTS_THAN_BLOCKS)
    check_all(interpreter, [whole, *(replace(split, parts=count) for count in parts)])


@pytest.mark.parametrize(
    ("q_len", "parts"), nightly_but([(2, 7)], product(range(1, 7), (ONE_PART, 7)))
)
def test_long_caches_in_large_blocks(interpreter: Interpreter, q_len: int, parts: int) -> None:
    lengths = tuple(4096 + rest for rest in range(q_len + 1))
    case = Case((q_len,) * len(lengths), lengths, page=64, dtype=FLOAT16, parts=parts)
    check_all(interpreter, [case])


@pytest.mark.parametrize(
    ("kind", "parts"),
    nightly_but(list(zip(KINDS, (3, None, 3), strict=True)), product(KINDS, (None, 3))),
)
def test_ragged_batch_at_deepseek_sizes(
    interpreter: Interpreter, kind: tuple[torch.dtype, bool], parts: int | None
) -> None:
    dtype, fp8 = kind
    check_all(interpreter, [replace(MIXED, dtype=dtype, fp8=fp8, parts=parts)])


@pytest.mark.parametrize("rows", nightly_but([16, 17, 33, 65], (16, 17, 32, 33, 64, 65, 130)))
def test_every_tile(interpreter: Interpreter, rows: int) -> None:
    """Tiles of 16, 32 and 64 rows, one and several of them, one head to a row."""
    case = Case((rows, 1), (rows + 70, 40), heads=1, page=64, dtype=FLOAT16)
    check_all(interpreter, [replace(case, parts=2, fp8=fp8) for fp8 in (False, True)])


@pytest.mark.parametrize("page", nightly_but([1, 24], (1, 3, 8, 20, 24)))
def test_pages_that_hold_no_whole_block(interpreter: Interpreter, page: int) -> None:
    """The tokens of a block lie in several pages, and the last page of a request is not full."""
    case = Case((3, 1, 0, 2), (70, 33, 5, 1), heads=5, page=page, dtype=FLOAT16)
    check_all(interpreter, [replace(case, parts=4, fp8=fp8) for fp8 in (False, True)])


ragged_batches = given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 70)), min_size=1, max_size=4),
    heads=st.integers(1, 10),
    page=st.sampled_from([16, 48, 64]),
    kind=st.sampled_from(KINDS),
    parts=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)


def check_one(
    interpreter: Interpreter,
    requests: list[tuple[int, int]],
    heads: int,
    page: int,
    kind: tuple[torch.dtype, bool],
    parts: int,
    seed: int,
) -> None:
    q_lens, kv_lens = zip(*requests, strict=True)
    dtype, fp8 = kind
    case = Case(
        q_lens, kv_lens, heads=heads, page=page, dtype=dtype, fp8=fp8, parts=parts, seed=seed
    )
    check_all(interpreter, [case])


test_random_ragged_batches = settings(max_examples=10, deadline=None)(ragged_batches(check_one))
test_many_random_ragged_batches = pytest.mark.nightly(
    settings(max_examples=100, deadline=None)(ragged_batches(check_one))
)


def test_fused_equals_expanded(interpreter: Interpreter) -> None:
    """A group of 4 over 100 tokens, and the same rows one at a time: 97, 98, 99 and 100 tokens."""
    fused = Case((4,), (100,), parts=3)
    check_all(interpreter, [fused, Case((1, 1, 1, 1), (97, 98, 99, 100), parts=3)])


def test_results_do_not_depend_on_the_order_of_requests(interpreter: Interpreter) -> None:
    moved, _ = reordered(MIXED, [4, 2, 5, 0, 3, 1])
    check_all(interpreter, [replace(moved, parts=3)])  # before they moved, above


def test_bf16_is_refused_in_the_interpreter(interpreter: Interpreter) -> None:
    message = interpreter.error(replace(MIXED, dtype=torch.bfloat16))
    assert "expected float16 or float32, found bfloat16" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp8": True}, "(architecture 9.0, Triton 3.6), found fp32 over fp8"),
        ({"latent": 24}, "latent size that is a power of two"),
        ({"rope": 8}, "rope size that is a power of two"),
    ],
)
def test_unsupported_sizes_are_refused(
    interpreter: Interpreter, change: dict[str, Any], message: str
) -> None:
    assert message in interpreter.error(replace(Case((1,), (5,)), **change))
