"""Runs the Triton backend in Triton's interpreter, in a process of its own.

TRITON_INTERPRET is read when Triton and the kernels are imported, so a process either interprets
or compiles. A worker process interprets; the tests that compile are left with a clean process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from attention_cases import Case, build


class Interpreter:
    """A worker process that interprets the kernels of whole cases."""

    def __init__(self) -> None:
        self.pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=enter_interpreter
        )

    def attend(self, cases: Sequence[Case]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The result of each case."""
        results = self.pool.map(attend_interpreted, cases)
        return [
            (torch.tensor(out, dtype=case.dtype), torch.tensor(lse))
            for case, (out, lse) in zip(cases, results, strict=True)
        ]

    def plan(
        self, q_lens: Sequence[int], kv_lens: Sequence[int], parts: int, tokens: int, min_share: int
    ) -> tuple[list[int], list[int], int]:
        """Run the plan kernel: starts, first and end request by part, and the share."""
        return self.pool.submit(
            plan_interpreted, list(q_lens), list(kv_lens), parts, tokens, min_share
        ).result()

    def error(self, case: Case) -> str:
        """The message of the ValueError a case raises."""
        return self.pool.submit(error_interpreted, case).result()

    def close(self) -> None:
        self.pool.shutdown()


def enter_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def attend_interpreted(case: Case) -> tuple[object, object]:
    """Run one case with poisoned outputs; float32 arrays, which hold float16 exactly."""
    from mtp_kernels.verify_attention import make_workspace, verify_attention

    arguments = build(case)
    queries = sum(case.q_lens)
    workspace = make_workspace(
        batch=max(1, len(case.q_lens)), queries=max(1, queries),
        max_q_len=max(1, *case.q_lens, 1), kv_tokens=arguments["page_table"].shape[1] * case.page,
        heads=case.heads, page=case.page, dtype=case.dtype,
        kv_dtype=arguments["kv_cache"].dtype, latent=case.latent, rope=case.rope,
        backend="triton_cuda", parts=case.parts,
    )  # fmt: skip
    workspace.buffer.fill_(0xFF)  # NaN as floats, nonsense as indices
    out = (
        torch.full_like(arguments["q_latent"], torch.nan),
        torch.full((queries, case.heads), torch.nan),
    )
    verify_attention(**arguments, backend="triton_cuda", workspace=workspace, out=out)
    return out[0].float().numpy(), out[1].numpy()


def plan_interpreted(
    q_lens: list[int], kv_lens: list[int], parts: int, tokens: int, min_share: int
) -> tuple[list[int], list[int], int]:
    import triton

    from mtp_kernels.verify_attention.triton_kernels import PLANNED, plan_kernel

    batch = len(q_lens)
    starts = torch.full((batch + 1,), -7, dtype=torch.int32)
    requests = torch.full((2 * parts,), -7, dtype=torch.int32)
    share = torch.full((1,), -7, dtype=torch.int32)
    cu_q = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    plan_kernel[(triton.cdiv(parts, PLANNED.value),)](
        torch.tensor(kv_lens, dtype=torch.int32), cu_q, starts, requests, share, batch, parts,
        BATCH_POW2=triton.next_power_of_2(batch), TOKENS=tokens, MIN_SHARE=min_share,
    )  # fmt: skip
    return starts.tolist(), requests.tolist(), int(share)


def error_interpreted(case: Case) -> str:
    try:
        attend_interpreted(case)
    except ValueError as error:
        return str(error)
    return "no error"
