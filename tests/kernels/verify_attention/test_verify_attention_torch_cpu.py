"""torch_cpu over the whole matrix, in every dtype, with and without bf16 matrix units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, check, expanded, lengths_around, rearranged
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels.verify_attention import make_workspace, torch_cpu, verify_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [1, 8, 16, 17, 128]
MIXED = Case((2, 0, 6, 3, 1, 5), (0, 9, 3, 200, 129, 64), heads=17, latent=512, rope=64, page=64)


def attend(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return verify_attention(**build(case), backend="torch_cpu", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", range(1, 7))
def test_every_length_around_an_edge(dtype: torch.dtype, fp8: bool, heads: int, q_len: int) -> None:
    lengths = lengths_around(q_len, page=16)
    case = Case((q_len,) * len(lengths), lengths, heads=heads, dtype=dtype, fp8=fp8)
    check(case, *attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", range(1, 7))
def test_long_caches(dtype: torch.dtype, q_len: int) -> None:
    lengths = tuple(4096 + rest for rest in range(q_len + 1))
    case = Case((q_len,) * len(lengths), lengths, heads=2, page=64, dtype=dtype)
    check(case, *attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bf16_matmul", [False, True])
def test_ragged_batch_at_deepseek_sizes(
    dtype: torch.dtype, fp8: bool, bf16_matmul: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bf16 products are right on every CPU, only slow where it has no units for them.
    monkeypatch.setattr(torch_cpu, "has_bf16_matmul", lambda: bf16_matmul)
    case = replace(MIXED, dtype=dtype, fp8=fp8)
    check(case, *attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_and_several_steps(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cpu, "MAX_SCORES", 4096)
    monkeypatch.setattr(torch_cpu, "MAX_ROWS", 128)
    case = Case((100, 0, 150, 4), (100, 7, 120, 500), heads=4, dtype=dtype)
    check(case, *attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_in_a_row_are_read_in_place(dtype: torch.dtype) -> None:
    case = Case((3, 2), (130, 70), page=16, dtype=dtype)
    arguments = build(case)
    want = verify_attention(**arguments, backend="torch_cpu")
    counts = [-(-kv_len // case.page) for kv_len in case.kv_lens]
    table = arguments["page_table"]
    pages = torch.cat([row[:count] for row, count in zip(table, counts, strict=True)])
    arguments["kv_cache"] = arguments["kv_cache"][pages]
    for row, count, start in zip(table, counts, (0, counts[0]), strict=True):
        row[:count] = torch.arange(start, start + count)
    got = verify_attention(**arguments, backend="torch_cpu")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_workspace_serves_every_smaller_call(dtype: torch.dtype) -> None:
    """Fewer rows take more tokens a step, but never more memory than the workspace was made for."""
    sizes = {"batch": 4, "queries": 24, "kv_tokens": 8192, "page": 64, "dtype": dtype}
    for heads in (1, 16, 17, 128):
        needed = [
            make_workspace(
                max_q_len=q_len, heads=heads, backend="torch_cpu", **sizes
            ).buffer.numel()
            for q_len in (1, 2, 3, 5, 6, 24)
        ]
        assert needed == sorted(needed)


@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 150)), min_size=1, max_size=6),
    heads=st.integers(1, 20),
    page=st.sampled_from([1, 3, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    fp8=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_random_ragged_batches(
    requests: list[tuple[int, int]],
    heads: int,
    page: int,
    dtype: torch.dtype,
    fp8: bool,
    seed: int,
) -> None:
    q_lens, kv_lens = zip(*requests, strict=True)
    case = Case(q_lens, kv_lens, heads=heads, page=page, dtype=dtype, fp8=fp8, seed=seed)
    check(case, *attend(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_equals_expanded(dtype: torch.dtype) -> None:
    case = replace(MIXED, dtype=dtype)
    check(case, *verify_attention(**expanded(build(case)), backend="torch_cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_order_of_requests_or_on_a_workspace(
    dtype: torch.dtype,
) -> None:
    arguments = build(replace(MIXED, dtype=dtype))
    out, lse = verify_attention(**arguments, backend="torch_cpu")
    order = [4, 2, 5, 0, 3, 1]
    other, rows = rearranged(replace(MIXED, dtype=dtype), order)
    workspace = make_workspace(
        batch=8, queries=32, max_q_len=8, kv_tokens=512, heads=17, page=64, dtype=dtype,
        backend="torch_cpu",
    )  # fmt: skip
    for _ in range(2):  # also: the same bits every time
        moved_out, moved_lse = verify_attention(**other, backend="torch_cpu", workspace=workspace)
        assert torch.equal(moved_out, out[rows]) and torch.equal(moved_lse, lse[rows])


def test_scores_in_bf16_keep_float32_accuracy() -> None:
    """A bf16 product alone, rounded when stored, would put errors of 0.1 into this lse."""
    case = Case((4,), (300,), latent=512, rope=64, page=64, dtype=torch.bfloat16)
    arguments = build(case) | {"scale": 1.0}
    _, lse = verify_attention(**arguments, backend="torch_cpu")
    _, want = verify_attention(**arguments, backend="reference")
    torch.testing.assert_close(lse, want, rtol=0, atol=1e-3)
