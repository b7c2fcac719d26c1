"""Verification attention one query row at a time, in float64: the definition of correct."""

from __future__ import annotations

import torch

from mtp_kernels.verify_attention.inputs import Inputs, Sizes


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    """Return 0: the reference needs no scratch memory."""
    return 0


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write the float64 result of every row, rounded once, into `out` and `lse`."""
    exact_out, exact_lse = attend_float64(inputs)
    out.copy_(exact_out)
    lse.copy_(exact_lse)


def attend_float64(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [T, h, c] and lse [T, h] in float64."""
    query = torch.cat([inputs.q_latent, inputs.q_rope], dim=-1).double()  # [T, h, c+r]
    out = torch.zeros_like(inputs.q_latent, dtype=torch.float64)
    lse = torch.full_like(out[..., 0], -torch.inf)
    starts, kv_lens = inputs.cu_q.tolist(), inputs.kv_lens.tolist()
    for request, kv_len in enumerate(kv_lens):
        tokens = cached_tokens(inputs, request, kv_len)  # [t, c+r]
        start, end = starts[request], starts[request + 1]
        for row in range(start, end):
            seen = kv_len - (end - 1 - row)
            if seen > 0:
                out[row], lse[row] = attend_row(query[row], tokens[:seen], inputs)
    return out, lse


def cached_tokens(inputs: Inputs, request: int, kv_len: int) -> torch.Tensor:
    """Return a request's first `kv_len` tokens [t, c+r] in float64, with their scale applied."""
    page = inputs.sizes.page
    slots = torch.tensor(
        [(int(inputs.page_table[request, t // page]), t % page) for t in range(kv_len)],
        dtype=torch.long,
        device=inputs.kv_cache.device,
    ).view(-1, 2)
    tokens = inputs.kv_cache[slots[:, 0], slots[:, 1]].double()
    if inputs.rope_cache is not None:
        rope_keys = inputs.rope_cache[slots[:, 0], slots[:, 1]].double()
        tokens = torch.cat([tokens, rope_keys], dim=-1)
    if inputs.kv_scale is not None:
        tokens = tokens * inputs.kv_scale[slots[:, 0], slots[:, 1]].double()[:, None]
    return tokens


def attend_row(
    query: torch.Tensor, tokens: torch.Tensor, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all heads of one query position: out [h, c] and lse [h]."""
    scores = torch.einsum("hd,td->ht", query, tokens) * inputs.scale
    probs = torch.softmax(scores, dim=-1)
    out = torch.einsum("ht,tc->hc", probs, tokens[:, : inputs.sizes.latent])
    return out, torch.logsumexp(scores, dim=-1)
