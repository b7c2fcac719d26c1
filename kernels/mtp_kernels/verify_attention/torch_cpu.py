"""Verification attention with torch on a CPU: a request's queries x heads share each matmul.

The pages of a request are gathered once into scratch memory, whatever its q_len, and every product
has all its rows; only the last columns, where the rows' limits differ, are masked. Scores keep
float32 accuracy. Where the CPU has bf16 matrix units (AMX) they multiply bf16 inputs; elsewhere,
and for every other dtype, the products are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.verify_attention.inputs import Carver, Inputs, Sizes, array_bytes

# The scores of one step, [rows, tokens], stay under this many entries, and its rows under MAX_ROWS
# (long groups, as in prefill, go in blocks of queries): scratch memory is bounded by about 6 MB
# of scores plus the gathered tokens. Up to there longer steps are faster, beyond slower.
MAX_SCORES = 1 << 19
MAX_ROWS = 2048
MASKED = -1e30  # finite: the softmax of a fully masked row is finite, and then has no weight


@dataclass(frozen=True)
class Scratch:
    """Reused memory of the steps: `tokens` and `scores` are the most entries a step has."""

    gathered: torch.Tensor  # [tokens, c+r], as stored
    converted: torch.Tensor  # [tokens, c+r], as multiplied
    scores_by_token: torch.Tensor  # [scores], float32
    scores_by_row: torch.Tensor  # [scores], float32
    rounded: torch.Tensor  # [2, scores], bf16


@dataclass(frozen=True)
class Rows:
    """The rows of one step's products: consecutive query positions of a request, all heads."""

    query: torch.Tensor  # [s*h, c+r], as multiplied
    limits: torch.Tensor  # [s], the tokens each position sees, all at least 1


def has_bf16_matmul() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AMX)."""
    return torch._C._has_mkldnn and torch.cpu._is_amx_tile_supported()


def product_dtype(sizes: Sizes) -> torch.dtype:
    use_bf16 = sizes.dtype == torch.bfloat16 and has_bf16_matmul()
    return torch.bfloat16 if use_bf16 else torch.float32


def queries_per_step(sizes: Sizes) -> int:
    return max(1, min(sizes.max_q_len, MAX_ROWS // sizes.heads))


def tokens_per_step(sizes: Sizes) -> int:
    """A whole number of pages: all of a request's tokens if their scores fit, at least one page."""
    pages = -(-sizes.kv_tokens // sizes.page)
    fitting = MAX_SCORES // (queries_per_step(sizes) * sizes.heads * sizes.page)
    return max(1, min(pages, fitting)) * sizes.page


def layout(sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of `Scratch`, in its order."""
    tokens, width = tokens_per_step(sizes), sizes.latent + sizes.rope
    scores = tokens * queries_per_step(sizes) * sizes.heads
    converted = 0 if product_dtype(sizes) == sizes.kv_dtype else tokens
    rounded = scores if product_dtype(sizes) == torch.bfloat16 else 0
    return [
        ((tokens, width), sizes.kv_dtype),
        ((converted, width), product_dtype(sizes)),
        ((scores,), torch.float32),
        ((scores,), torch.float32),
        ((2, rounded), torch.bfloat16),
    ]


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    return sum(array_bytes(shape, dtype) for shape, dtype in layout(sizes))


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [T, h, c] and lse [T, h]; `buffer` has at least `workspace_bytes` bytes."""
    sizes = inputs.sizes
    carver = Carver(buffer)
    scratch = Scratch(*(carver.take(shape, dtype) for shape, dtype in layout(sizes)))
    query = torch.cat([inputs.q_latent, inputs.q_rope], dim=-1).to(product_dtype(sizes))
    starts, kv_lens = inputs.cu_q.tolist(), inputs.kv_lens.tolist()
    for request, kv_len in enumerate(kv_lens):
        start, end = starts[request], starts[request + 1]
        seeing = min(end, max(start, end - kv_len))  # rows before it see no token
        out[start:seeing] = 0
        lse[start:seeing] = -torch.inf
        step = queries_per_step(sizes)
        for first in range(seeing, end, step):
            last = min(first + step, end)
            limits = torch.arange(kv_len - (end - 1 - first), kv_len - (end - 1 - last))
            rows = Rows(query[first:last].flatten(0, 1), limits)
            attend_rows(inputs, scratch, request, rows, out[first:last], lse[first:last])


def attend_rows(
    inputs: Inputs,
    scratch: Scratch,
    request: int,
    rows: Rows,
    out: torch.Tensor,  # [s, h, c]
    lse: torch.Tensor,  # [s, h]
) -> None:
    """Attend from some rows of a request to every token they see, step by step."""
    out, lse = out.flatten(0, 1), lse.flatten(0, 1)
    kv_len, step = int(rows.limits[-1]), tokens_per_step(inputs.sizes)
    if kv_len <= step:
        attend_step(inputs, scratch, request, rows, (0, kv_len), out, lse)
        return
    total_out = torch.zeros_like(out, dtype=torch.float32)
    total_lse = torch.full_like(lse, -torch.inf)
    for first in range(0, kv_len, step):
        span = (first, min(first + step, kv_len))
        attend_step(inputs, scratch, request, rows, span, out, lse)
        merged = torch.logaddexp(total_lse, lse)
        total_out *= (total_lse - merged).exp_()[:, None]
        total_out += out * (lse - merged).exp_()[:, None]
        total_lse = merged
    out.copy_(total_out)
    lse.copy_(total_lse)


def attend_step(
    inputs: Inputs,
    scratch: Scratch,
    request: int,
    rows: Rows,
    span: tuple[int, int],
    out: torch.Tensor,  # [s*h, c]
    lse: torch.Tensor,  # [s*h]
) -> None:
    """Attend to the tokens of `span` alone; rows that see none of them get lse -inf."""
    tokens, token_scale = gather(inputs, scratch, request, span)
    count = tokens.shape[0] * rows.query.shape[0]
    by_token = scratch.scores_by_token[:count].view(tokens.shape[0], -1)  # [t, s*h]
    multiply_scores(tokens, rows.query, scratch, by_token)
    factor = inputs.scale if token_scale is None else token_scale * inputs.scale
    scores = scratch.scores_by_row[:count].view(-1, tokens.shape[0])  # [s*h, t]
    torch.mul(by_token.t(), factor, out=scores)
    mask_unseen(scores, rows.limits, span)
    probs = torch.softmax(scores, dim=1, out=scratch.scores_by_token[:count].view_as(scores))
    # The largest probability is exp(largest score - lse): two cheap reductions instead of a sum
    # of exponentials.
    torch.sub(scores.amax(1), probs.amax(1).log_(), out=lse)
    lse.view(len(rows.limits), -1)[rows.limits <= span[0]] = -torch.inf
    if token_scale is not None:
        probs *= token_scale
    latent = tokens[:, : inputs.sizes.latent]
    if tokens.dtype == torch.bfloat16:
        probs = scratch.rounded[0, :count].view_as(probs).copy_(probs)
    if out.dtype == tokens.dtype:
        torch.mm(probs, latent, out=out)
    else:
        out.copy_(torch.mm(probs, latent))


def gather(
    inputs: Inputs, scratch: Scratch, request: int, span: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens of `span` as the products take them, and their scales; `span` starts a page."""
    page, count = inputs.sizes.page, span[1] - span[0]
    pages = inputs.page_table[request, span[0] // page : -(-span[1] // page)]
    stored = scratch.gathered[: len(pages) * page]
    torch.index_select(inputs.kv_cache, 0, pages, out=stored.view(len(pages), page, -1))
    tokens, scale = stored[:count], None
    if scratch.converted.numel():
        tokens = scratch.converted[:count].copy_(tokens)
    if inputs.kv_scale is not None:
        scale = inputs.kv_scale.index_select(0, pages).flatten()[:count]
    return tokens, scale


def multiply_scores(
    tokens: torch.Tensor, query: torch.Tensor, scratch: Scratch, scores: torch.Tensor
) -> None:
    """Write tokens x query [t, s*h] into float32 `scores`.

    A bf16 product accumulates in float32 but is rounded to bf16 when stored, too coarse for an
    exponent. A second product, started from minus the first, stores what the rounding dropped.
    """
    if tokens.dtype != torch.bfloat16:
        torch.mm(tokens, query.t(), out=scores)
        return
    coarse = scratch.rounded[0, : scores.numel()].view_as(scores)
    dropped = scratch.rounded[1, : scores.numel()].view_as(scores)
    torch.mm(tokens, query.t(), out=coarse)
    torch.addmm(coarse, tokens, query.t(), beta=-1, out=dropped)
    scores.copy_(coarse).add_(dropped)  # torch.add(coarse, dropped) would round to bf16 again


def mask_unseen(scores: torch.Tensor, limits: torch.Tensor, span: tuple[int, int]) -> None:
    """Mask the columns past each row's limit; only columns past the smallest limit are touched."""
    first = max(span[0], int(limits[0]))
    if first >= span[1]:
        return
    unseen = torch.arange(first, span[1]) >= limits[:, None]  # [s, t]
    columns = scores.view(len(limits), -1, scores.shape[1])[:, :, first - span[0] :]
    columns.masked_fill_(unseen[:, None], MASKED)
