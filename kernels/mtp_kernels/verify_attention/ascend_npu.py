"""Verification attention on Ascend NPUs: one call of CANN's fused inference attention per batch.

The operator reads latents and rope keys from two contiguous caches, and takes lengths as lists from
the host. It is called within its documented limits alone: rows that see no token, of which its
documentation says nothing, are left out, and requests of more rows than it takes are cut.

Source: npu_fused_infer_attention_score_v2 in op-plugin's documentation, latent attention (D = 512).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mtp_kernels.verify_attention.inputs import Inputs, Sizes

OPERATOR = "npu_fused_infer_attention_score_v2"
DTYPES = (torch.bfloat16, torch.float16)
LATENT, ROPE = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
PAGE_STEP, MAX_PAGE = 16, 1024
MAX_ROWS = 16  # of a request
MAX_REQUESTS = 4096
MASK_SIZE = 2048  # of the one mask that the causal mode takes, whatever the lengths
RIGHT_DOWN_CAUSAL = 3  # the last row sees all tokens, each row before it one less


@dataclass(frozen=True)
class Piece:
    """Query rows [first, stop) of a request, the last of which sees its first `tokens` tokens."""

    request: int
    first: int
    stop: int
    tokens: int


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    """Return 0: the operator allocates its own. ValueError for sizes that it does not take."""
    check_limits(sizes)
    return 0


def check_limits(sizes: Sizes) -> None:
    """Refuse dtypes and sizes that the operator does not document."""
    page = sizes.page
    limits: tuple[tuple[str, object, bool], ...] = (
        ("bfloat16 or float16 queries", sizes.dtype, sizes.dtype in DTYPES),
        ("a cache in the queries' dtype", sizes.kv_dtype, sizes.kv_dtype == sizes.dtype),
        (f"latents of {LATENT}", sizes.latent, sizes.latent == LATENT),
        (f"rope keys of {ROPE}", sizes.rope, sizes.rope == ROPE),
        (f"{', '.join(map(str, HEADS))} heads", sizes.heads, sizes.heads in HEADS),
        (
            f"pages of a multiple of {PAGE_STEP} tokens up to {MAX_PAGE}",
            page,
            page % PAGE_STEP == 0 and page <= MAX_PAGE,
        ),
    )
    for expected, found, fits in limits:
        if not fits:
            raise ValueError(f"backend ascend_npu: expected {expected}, found {found}")


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [T, h, c] and lse [T, h]."""
    pieces = pieces_of(inputs.cu_q.tolist(), inputs.kv_lens.tolist())
    if len(pieces) > MAX_REQUESTS:
        raise ValueError(
            f"backend ascend_npu: expected at most {MAX_REQUESTS} requests of up to {MAX_ROWS} "
            f"query rows, found {len(pieces)}"
        )
    rows = sum(piece.stop - piece.first for piece in pieces)
    if rows == len(out) > 0:
        attended, sums = call(inputs, pieces, inputs.q_latent, inputs.q_rope)
        out.copy_(attended)
        lse.copy_(sums)
        return
    out.zero_()
    lse.fill_(-torch.inf)
    if pieces:
        served = [row for piece in pieces for row in range(piece.first, piece.stop)]
        index = torch.tensor(served, device=out.device)
        queries = inputs.q_latent[index], inputs.q_rope[index]
        out[index], lse[index] = call(inputs, pieces, *queries)


def pieces_of(cu_q: Sequence[int], kv_lens: Sequence[int]) -> list[Piece]:
    """Cut requests into pieces of up to MAX_ROWS rows, without the rows that see no token."""
    return [
        Piece(request, first, stop, tokens=kv_len - (cu_q[request + 1] - stop))
        for request, kv_len in enumerate(kv_lens)
        for first, stop in _cuts(cu_q[request], cu_q[request + 1], kv_len)
    ]


def _cuts(start: int, end: int, kv_len: int) -> list[tuple[int, int]]:
    """Return the ends of a request's pieces."""
    firsts = range(max(start, end - kv_len), end, MAX_ROWS)
    return [(first, min(first + MAX_ROWS, end)) for first in firsts]


def call(
    inputs: Inputs, pieces: Sequence[Piece], q_latent: torch.Tensor, q_rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator over the pieces' rows; returns out [T, h, c] and lse [T, h]."""
    latents, page_table, ends = inputs.kv_cache, inputs.page_table, list[int]()
    for piece in pieces:
        ends.append(piece.stop - piece.first + (ends[-1] if ends else 0))
    requests = [piece.request for piece in pieces]
    if requests != list(range(len(page_table))):
        page_table = page_table[torch.tensor(requests, device=page_table.device)]
    attended, sums = operator()(
        q_latent,
        latents,
        latents,
        query_rope=q_rope,
        key_rope=inputs.rope_cache,
        atten_mask=causal_mask(q_latent.device),
        actual_seq_qlen=ends,
        actual_seq_kvlen=[piece.tokens for piece in pieces],
        block_table=page_table,
        num_query_heads=inputs.sizes.heads,
        num_key_value_heads=1,
        softmax_scale=inputs.scale,
        input_layout="TND",
        sparse_mode=RIGHT_DOWN_CAUSAL,
        block_size=inputs.sizes.page,
        return_softmax_lse=True,
    )
    return attended, sums[..., 0]


def operator() -> Any:
    """Return the operator (ValueError where torch_npu has not registered it)."""
    if not hasattr(torch.ops.npu, OPERATOR):
        raise ValueError(
            f"backend ascend_npu: expected torch_npu's operator {OPERATOR}, found none: install "
            "the extra npu beside CANN"
        )
    return getattr(torch.ops.npu, OPERATOR)


@cache
def causal_mask(device: torch.device) -> torch.Tensor:
    """Return the operator's mask [MASK_SIZE, MASK_SIZE] int8: 1 above the diagonal."""
    ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device)
    return ones.triu_(1)
