"""compiled_cpu in bf16: the whole matrix, shares of several threads, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import Case, build, check, expanded, lengths_around, rearranged
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.compiled_apart import run_apart
from mtp_kernels.verify_attention import make_workspace, verify_attention
from mtp_kernels.verify_attention.bf16_units import units_here
from mtp_kernels.verify_attention.compiled_bf16 import STEP_TOKENS
from mtp_kernels.verify_attention.shares import BLOCK_TOKENS, items_of, share_of, work_of

BF16 = torch.bfloat16
BASE = Case((1,), (1,), latent=64, rope=32, dtype=BF16)
MIXED = Case(
    (2, 0, 6, 3, 1, 5),
    (0, 9, 3, 1200, 129, 600),
    heads=17,
    latent=512,
    rope=64,
    page=64,
    dtype=BF16,
)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return verify_attention(**build(case), backend="compiled_cpu")


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 128])
@pytest.mark.parametrize("q_len", range(1, 7))
def test_every_length_around_an_edge(heads: int, q_len: int) -> None:
    for page in (1, 16):
        lengths = lengths_around(q_len, page)
        case = replace(
            BASE, q_lens=(q_len,) * len(lengths), kv_lens=lengths, heads=heads, page=page
        )
        check(case, *attend(case))


@pytest.mark.parametrize("q_len", range(1, 7))
def test_lengths_around_steps(q_len: int) -> None:
    edges = (BLOCK_TOKENS, STEP_TOKENS, 2 * STEP_TOKENS, 4096)
    lengths = tuple(edge + rest for edge in edges for rest in range(q_len + 1))
    case = replace(BASE, q_lens=(q_len,) * len(lengths), kv_lens=lengths, heads=2, page=64)
    check(case, *attend(case))


@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 700)), min_size=1, max_size=6),
    heads=st.integers(1, 20),
    page=st.sampled_from([1, 3, 16, 64]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_random_ragged_batches(
    requests: list[tuple[int, int]], heads: int, page: int, threads: int, seed: int
) -> None:
    q_lens, kv_lens = zip(*requests, strict=True)
    torch.set_num_threads(threads)
    case = replace(BASE, q_lens=q_lens, kv_lens=kv_lens, heads=heads, page=page, seed=seed)
    check(case, *attend(case))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_share_one_request(threads: int) -> None:
    """More threads than a short request has blocks, and shares that begin and end inside one."""
    torch.set_num_threads(threads)
    for kv_lens in ((130,), (4096,), (2000, 3000)):
        case = replace(MIXED, q_lens=(4,) * len(kv_lens), kv_lens=kv_lens)
        check(case, *attend(case))
        assert all(map(torch.equal, attend(case), attend(case)))


def test_prefill_goes_in_blocks_of_rows() -> None:
    case = replace(MIXED, q_lens=(100, 0, 150, 4), kv_lens=(100, 7, 120, 500))
    check(case, *attend(case))


def test_fused_equals_expanded() -> None:
    check(MIXED, *verify_attention(**expanded(build(MIXED)), backend="compiled_cpu"))


def test_results_do_not_depend_on_a_workspace() -> None:
    arguments = build(MIXED)
    expected = verify_attention(**arguments, backend="compiled_cpu")
    workspace = make_workspace(
        batch=8, queries=32, max_q_len=8, kv_tokens=2048, heads=17, page=64, dtype=BF16
    )
    workspace.buffer.fill_(0x7F)  # NaN in every dtype
    for _ in range(2):
        found = verify_attention(**arguments, backend="compiled_cpu", workspace=workspace)
        assert all(map(torch.equal, found, expected))


def test_on_one_thread_the_order_of_requests_changes_nothing() -> None:
    torch.set_num_threads(1)
    arguments, order = build(MIXED), [4, 2, 5, 0, 3, 1]
    out, lse = verify_attention(**arguments, backend="compiled_cpu")
    other, rows = rearranged(MIXED, order)
    found = verify_attention(**other, backend="compiled_cpu")
    assert torch.equal(found[0], out[rows]) and torch.equal(found[1], lse[rows])


def test_auto_takes_it() -> None:
    arguments = build(MIXED)
    expected = verify_attention(**arguments, backend="compiled_cpu")
    assert all(map(torch.equal, verify_attention(**arguments), expected))


@pytest.mark.nightly
@pytest.mark.parametrize("unit", units_here()[1:])
def test_the_other_units_of_this_cpu(unit: str, tmp_path: Path) -> None:
    """Each in a process of its own, in which it is the only one."""
    code = (
        "import sys, pytest\n"
        "from mtp_kernels.verify_attention import bf16_units\n"
        f"bf16_units.units_here = lambda: ({unit!r},)\n"
        "chosen = 'threads_share or around_steps or fused_equals'\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', chosen, {__file__!r}]))\n"
    )
    run_apart(code, tmp_path)


def test_what_fills_no_whole_tiles_is_refused() -> None:
    for case in (replace(BASE, latent=40, rope=8), replace(BASE, fp8=True)):
        with pytest.raises(ValueError, match="multiples of 32"):
            attend(case)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_cover_every_block_once(count: int) -> None:
    q_lens, kv_lens = torch.tensor([0, 3, 4, 9, 15]), torch.tensor([0, 64, 65, 5000])
    items = items_of(q_lens.int().numpy(), kv_lens.int().numpy(), 16)
    total, before = work_of(items), 0
    loads = [0] * count
    for item in items:
        blocks = max(1, -(-int(item["tokens"]) // BLOCK_TOKENS))
        groups = -(-int(item["rows"]) // 16)
        shares = [share_of(item, before, total, number, count) for number in range(count)]
        taken = [block for first, last in shares for block in range(first, last)]
        assert taken == list(range(blocks))
        loads = [load + (b - a) * groups for load, (a, b) in zip(loads, shares, strict=True)]
        before += blocks * groups
    assert max(loads) - min(loads) <= 2 * 6
