"""The Triton backend on a GPU, over the whole matrix in every dtype, and in CUDA graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, check, expanded, lengths_around, rearranged

from mtp_kernels.verify_attention import make_workspace, verify_attention

pytestmark = pytest.mark.cuda
MIXED = Case((2, 0, 6, 3, 1, 5), (0, 9, 3, 200, 4099, 64), latent=512, rope=64, page=64)
KINDS = [
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.float16, False),
    (torch.float16, True),
    (torch.float32, False),
]
HEADS = [1, 8, 16, 17, 128]


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def runs_here(case: Case) -> bool:
    """GPUs before compute capability 8.9 convert no fp8, and the backend refuses it there."""
    return not case.fp8 or torch.cuda.get_device_capability() >= (8, 9)


def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a case whose workspace holds nonsense, cut into the case's parts."""
    if not runs_here(case):
        pytest.skip("this GPU converts no fp8")
    arguments = on_device(build(case))
    query = arguments["q_latent"]
    workspace = make_workspace(
        batch=max(1, len(case.q_lens)), queries=max(1, len(query)),
        max_q_len=max(1, *case.q_lens, 1), kv_tokens=arguments["page_table"].shape[1] * case.page,
        heads=case.heads, page=case.page, dtype=case.dtype, kv_dtype=arguments["kv_cache"].dtype,
        latent=case.latent, rope=case.rope, device=query.device, parts=case.parts,
    )  # fmt: skip
    workspace.buffer.fill_(0xFF)
    out, lse = verify_attention(**arguments, workspace=workspace)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(("dtype", "fp8"), KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_length_around_an_edge(dtype: torch.dtype, fp8: bool, heads: int) -> None:
    for q_len in range(1, 7):
        lengths = lengths_around(q_len, page=16)
        case = Case((q_len,) * len(lengths), lengths, heads=heads, dtype=dtype, fp8=fp8)
        for parts in (1, 5, 64, None):
            check(case, *attend(replace(case, parts=parts)))


@pytest.mark.parametrize(("dtype", "fp8"), KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_ragged_batches_at_deepseek_sizes(dtype: torch.dtype, fp8: bool, heads: int) -> None:
    case = replace(MIXED, dtype=dtype, fp8=fp8, heads=heads)
    for parts in (1, 3, None):
        check(case, *attend(replace(case, parts=parts)))


@pytest.mark.parametrize(("dtype", "fp8"), KINDS)
@pytest.mark.parametrize("q_len", range(1, 7))
def test_groups_of_one_length(dtype: torch.dtype, fp8: bool, q_len: int) -> None:
    lengths = (0, q_len, 65, *(4096 + rest for rest in range(q_len + 1)), 8192)
    case = Case(
        (q_len,) * len(lengths), lengths, latent=512, rope=64, page=64, dtype=dtype, fp8=fp8
    )
    check(case, *attend(case))


@pytest.mark.parametrize("seed", range(25))
def test_random_ragged_batches(seed: int) -> None:
    """A test each: kernels of every size are compiled, side by side where pytest-xdist is."""
    draw = random.Random(seed)
    requests = [(draw.randint(0, 6), draw.randint(0, 700)) for _ in range(draw.randint(1, 8))]
    q_lens, kv_lens = zip(*requests, strict=True)
    dtype, fp8 = KINDS[seed % len(KINDS)]
    case = Case(
        q_lens, kv_lens, heads=draw.randint(1, 40), page=draw.choice([1, 16, 24, 48, 64]),
        dtype=dtype, fp8=fp8, parts=draw.choice([None, draw.randint(1, 200)]), seed=seed,
    )  # fmt: skip
    check(case, *attend(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_equals_expanded_in_any_order(dtype: torch.dtype) -> None:
    case = replace(MIXED, dtype=dtype)
    out, lse = verify_attention(**on_device(expanded(build(case))))
    check(case, out.cpu(), lse.cpu())
    arguments, rows = rearranged(case, [4, 2, 5, 0, 3, 1])
    moved = verify_attention(**on_device(arguments))
    kept = [torch.empty_like(found) for found in moved]
    for one, found in zip(kept, moved, strict=True):
        one[rows.cuda()] = found
    check(case, kept[0].cpu(), kept[1].cpu())


def test_repetition_changes_no_bit() -> None:
    arguments = on_device(build(replace(MIXED, dtype=torch.bfloat16)))
    first = verify_attention(**arguments)
    assert all(map(torch.equal, first, verify_attention(**arguments)))


def test_a_captured_graph_follows_new_lengths_and_allocates_nothing() -> None:
    case = replace(MIXED, dtype=torch.bfloat16)
    arguments = on_device(build(case))
    query = arguments["q_latent"]
    workspace = make_workspace(
        batch=6, queries=len(query), max_q_len=6, page=64, heads=16, dtype=torch.bfloat16,
        kv_tokens=arguments["page_table"].shape[1] * 64, device=query.device,
    )  # fmt: skip
    out = (torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32))
    verify_attention(**arguments, workspace=workspace, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        verify_attention(**arguments, workspace=workspace, out=out)
    assert torch.cuda.memory_allocated() == before
    shorter = tuple(kv_len // 2 for kv_len in case.kv_lens)
    arguments["kv_lens"].copy_(torch.tensor(shorter, dtype=torch.int32))
    graph.replay()
    want = build(case) | {"kv_lens": torch.tensor(shorter, dtype=torch.int32)}
    want_out, want_lse = verify_attention(**want, backend="reference")
    assert (out[0].cpu().double() - want_out.double()).norm() <= 5e-3 * want_out.double().norm()
    torch.testing.assert_close(out[1].cpu(), want_lse, rtol=0, atol=1e-4)
