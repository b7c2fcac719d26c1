"""The Triton backend on a GPU: bf16, fp8, CUDA graphs. Skipped where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, check
from mtp_kernels.verify_attention import make_workspace, verify_attention

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIXED = Case((2, 0, 6, 3, 1, 5), (0, 9, 3, 200, 4099, 64), latent=512, rope=64, page=64)


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float16, True),
        (torch.float32, False),
    ],
)
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 128])
def test_ragged_batches(dtype: torch.dtype, fp8: bool, heads: int) -> None:
    case = replace(MIXED, dtype=dtype, fp8=fp8, heads=heads)
    out, lse = verify_attention(**on_device(build(case)))
    check(case, out.cpu(), lse.cpu())


@pytest.mark.parametrize("q_len", range(1, 7))
def test_groups_of_one_length(q_len: int) -> None:
    lengths = (0, q_len, 65, 4096, 4097, 8192)
    case = Case((q_len,) * 6, lengths, latent=512, rope=64, page=64, dtype=torch.bfloat16)
    out, lse = verify_attention(**on_device(build(case)))
    check(case, out.cpu(), lse.cpu())


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
