"""compiled_cpu over the whole matrix; and its bits, which depend on nothing but a row itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, check, expanded, lengths_around, rearranged
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels.cpu import paged_attention
from mtp_kernels.verify_attention import compiled_float32, verify_attention

HEADS = [1, 8, 16, 17, 128]
MIXED = Case((2, 0, 6, 3, 1, 5), (0, 9, 3, 200, 129, 64), heads=17, latent=512, rope=64, page=64)
PREFILL = Case((100, 0, 150, 4), (100, 7, 120, 500), heads=4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return verify_attention(**build(case), backend="compiled_cpu")


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", range(1, 7))
def test_every_length_around_an_edge(heads: int, q_len: int) -> None:
    lengths = lengths_around(q_len, page=16)
    case = Case((q_len,) * len(lengths), lengths, heads=heads)
    check(case, *attend(case))


@pytest.mark.parametrize("q_len", range(1, 7))
def test_long_caches(q_len: int) -> None:
    lengths = tuple(4096 + rest for rest in range(q_len + 1))
    case = Case((q_len,) * len(lengths), lengths, heads=2, page=64)
    check(case, *attend(case))


@pytest.mark.parametrize("sizes", [(32, 16), (40, 8), (16, 4), (33, 7)])
def test_sizes_that_are_no_whole_number_of_vectors(sizes: tuple[int, int]) -> None:
    case = Case((1, 3, 6), (7, 30, 161), heads=3, latent=sizes[0], rope=sizes[1], page=3)
    check(case, *attend(case))


@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 150)), min_size=1, max_size=6),
    heads=st.integers(1, 20),
    page=st.sampled_from([1, 3, 16, 64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_random_ragged_batches(
    requests: list[tuple[int, int]], heads: int, page: int, seed: int
) -> None:
    q_lens, kv_lens = zip(*requests, strict=True)
    case = Case(q_lens, kv_lens, heads=heads, page=page, seed=seed)
    check(case, *attend(case))


@pytest.mark.parametrize("case", [MIXED, PREFILL], ids=["blocks", "prefill"])
def test_bits_do_not_depend_on_the_group(case: Case) -> None:
    """Each query as a request of its own; the waves of a small memory; more threads."""
    expected = attend(case)
    check(case, *expected)
    assert same(expected, verify_attention(**expanded(build(case)), backend="compiled_cpu"))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert same(expected, attend(case))


def test_bits_do_not_depend_on_the_order_of_requests() -> None:
    arguments, order = build(MIXED), [4, 2, 5, 0, 3, 1]
    out, lse = verify_attention(**arguments, backend="compiled_cpu")
    other, rows = rearranged(MIXED, order)
    found = verify_attention(**other, backend="compiled_cpu")
    assert same(found, (out[rows], lse[rows]))


def test_long_prefill_goes_in_waves() -> None:
    """More parts than MAX_PARTS: 600 rows of 4 heads against up to 14 blocks."""
    case = replace(PREFILL, q_lens=(600, 3), kv_lens=(900, 130))
    arguments = build(case)
    names = ("cu_q", "kv_lens", "q_latent", "q_rope")
    _, waves, parts, _ = compiled_float32.arrange(*(arguments[name].numpy() for name in names))
    assert len(waves) > 2 and parts <= paged_attention.MAX_PARTS
    found = attend(case)
    check(case, *found)
    assert same(found, verify_attention(**expanded(arguments), backend="compiled_cpu"))
