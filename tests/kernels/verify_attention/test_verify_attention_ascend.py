"""The Ascend backend against the documented operator: every case of verification attention, and
what lies outside the operator's limits, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, check, lengths_around
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_kernels.verify_attention import ascend_npu, make_workspace, verify_attention
from npu_operator import registered, split

CASE = Case((2, 1), (20, 5), heads=2, latent=512, rope=64, dtype=torch.bfloat16)
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def calls() -> Iterator[list[dict[str, Any]]]:
    with registered() as calls:
        yield calls


@pytest.fixture(autouse=True)
def lists_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor given for a list would be converted silently, with a synchronisation."""
    real = ascend_npu.operator

    def operator() -> Any:
        def run(*tensors: Any, **given: Any) -> Any:
            lists = given["actual_seq_qlen"], given["actual_seq_kvlen"]
            assert [type(one) for one in lists] == [list, list]
            return real()(*tensors, **given)

        return run

    monkeypatch.setattr(ascend_npu, "operator", operator)


def attend(case: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return verify_attention(**split(build(case)) | changes, backend="ascend_npu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("q_len", [1, 2, 4, 6])
def test_every_length_around_an_edge(dtype: torch.dtype, heads: int, q_len: int) -> None:
    lengths = lengths_around(q_len, page=16)
    case = replace(CASE, q_lens=(q_len,) * len(lengths), kv_lens=lengths, heads=heads, dtype=dtype)
    check(case, *attend(case))


@pytest.mark.parametrize("page", [16, 48, 128, 1024])
def test_ragged_batches(page: int) -> None:
    case = replace(CASE, q_lens=(2, 0, 6, 3, 1, 5), kv_lens=(0, 9, 3, 200, 129, 64), page=page)
    check(case, *attend(case))


def test_prefill_is_cut_into_requests_of_16_rows(calls: list[dict[str, Any]]) -> None:
    case = replace(CASE, q_lens=(40, 1, 17), kv_lens=(100, 3, 17))
    calls.clear()
    check(case, *attend(case))
    assert calls[0]["actual_seq_qlen"] == [16, 32, 40, 41, 57, 58]
    assert calls[0]["actual_seq_kvlen"] == [76, 92, 100, 3, 16, 17]


def test_rows_that_see_nothing_are_not_given_to_the_operator(calls: list[dict[str, Any]]) -> None:
    case = replace(CASE, q_lens=(4, 0, 2), kv_lens=(1, 50, 0))
    calls.clear()
    check(case, *attend(case))
    assert calls[0]["actual_seq_qlen"] == [1] and calls[0]["actual_seq_kvlen"] == [1]
    calls.clear()
    check(nothing := replace(CASE, q_lens=(2, 1), kv_lens=(0, 0)), *attend(nothing))
    out, lse = attend(Case((), (), heads=2, latent=512, rope=64, dtype=torch.bfloat16))
    assert not calls and out.shape == (0, 2, 512) and lse.shape == (0, 2)


@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), min_size=1, max_size=5),
    heads=st.sampled_from([1, 2, 8]),
    page=st.sampled_from([16, 32, 80]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_random_ragged_batches(
    requests: list[tuple[int, int]], heads: int, page: int, dtype: torch.dtype, seed: int
) -> None:
    q_lens, kv_lens = zip(*requests, strict=True)
    case = replace(
        CASE, q_lens=q_lens, kv_lens=kv_lens, heads=heads, page=page, dtype=dtype, seed=seed
    )
    check(case, *attend(case))


def test_given_outputs_and_a_workspace_are_used() -> None:
    arguments = split(build(CASE))
    query = arguments["q_latent"]
    workspace = make_workspace(
        batch=2, queries=3, max_q_len=2, kv_tokens=64, heads=2, page=16, dtype=torch.bfloat16,
        backend="ascend_npu",
    )  # fmt: skip
    out = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    options: dict[str, Any] = {"workspace": workspace, "out": out, "backend": "ascend_npu"}
    found = verify_attention(**arguments, **options)
    assert found[0] is out[0] and found[1] is out[1]
    check(CASE, *out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "expected bfloat16 or float16 queries, found torch.float32"),
        ({"latent": 256}, "expected latents of 512, found 256"),
        ({"rope": 32}, "expected rope keys of 64, found 32"),
        ({"heads": 17}, "expected 1, 2, 4, 8, 16, 32, 64, 128 heads, found 17"),
        ({"page": 24}, "expected pages of a multiple of 16 tokens up to 1024, found 24"),
        ({"page": 2048}, "expected pages of a multiple of 16 tokens up to 1024, found 2048"),
    ],
)
def test_what_is_outside_the_limits_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    case = replace(CASE, **change)
    with pytest.raises(ValueError, match=f"^backend ascend_npu: {message}"):
        attend(case)
    sizes = {name: getattr(case, name) for name in ("heads", "page", "dtype", "latent", "rope")}
    with pytest.raises(ValueError, match=f"^backend ascend_npu: {message}"):
        make_workspace(batch=1, queries=1, max_q_len=1, kv_tokens=64, **sizes, backend="ascend_npu")


def test_other_caches_are_refused_by_name() -> None:
    arguments = build(replace(CASE, fp8=True))
    arguments["rope_cache"] = arguments["kv_cache"][..., 512:].contiguous()
    arguments["kv_cache"] = arguments["kv_cache"][..., :512].contiguous()
    with pytest.raises(ValueError, match="expected a cache in the queries' dtype, found .*float8"):
        verify_attention(**arguments, backend="ascend_npu")
    joined, apart = build(CASE), split(build(CASE))
    with pytest.raises(ValueError, match="expected kv_cache and rope_cache, found kv_cache alone"):
        verify_attention(**joined, backend="ascend_npu")
    with pytest.raises(ValueError, match="torch_cpu: expected kv_cache alone, found kv_cache and"):
        verify_attention(**apart, backend="torch_cpu")
    short = apart | {"rope_cache": apart["rope_cache"][:, :8].contiguous()}
    with pytest.raises(ValueError, match=r"rope_cache: expected shape \[.*, 16, 64\], found"):
        verify_attention(**short, backend="ascend_npu")


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_npu, "MAX_REQUESTS", 2)
    check(CASE, *attend(CASE))
    with pytest.raises(ValueError, match="expected at most 2 requests of up to 16 .* found 3"):
        attend(replace(CASE, q_lens=(17, 1), kv_lens=(20, 5)))


def test_the_reference_takes_a_split_cache() -> None:
    arguments = build(CASE)
    joined = verify_attention(**arguments, backend="reference")
    apart = verify_attention(**split(arguments), backend="reference")
    assert torch.equal(joined[0], apart[0]) and torch.equal(joined[1], apart[1])
