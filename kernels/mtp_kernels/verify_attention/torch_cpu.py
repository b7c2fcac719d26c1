"""Verification attention with torch on a CPU: a request's queries x heads share each matmul.

A request's cached tokens are read once, whatever its q_len, and every product has all its rows;
only the last columns, where the rows' limits differ, are masked. Scores keep float32 accuracy.
Where the CPU has bf16 matrix units (AMX) and queries and cache are bf16, they multiply; elsewhere
products are float32. Contributions of different tokens are merged by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.verify_attention.inputs import BumpAllocator, Inputs, Sizes, array_bytes

# Tokens gathered at a time, and the most float32 scores [rows, tokens] at a time. Rows are at most
# MAX_ROWS (long groups, as in prefill, go in blocks of queries): scratch memory is bounded.
MAX_TOKENS = 4096
MAX_SCORES = 1 << 19
MAX_ROWS = 2048
MASKED = -1e30  # finite: the softmax of a fully masked row is finite, and then has no weight


@dataclass(frozen=True)
class Scratch:
    """Reused memory of the steps."""

    gathered: torch.Tensor  # [tokens, c+r], as stored
    converted: torch.Tensor  # [tokens, c+r], as multiplied
    scores: torch.Tensor  # [scores], float32
    probs: torch.Tensor  # [scores], float32
    rounded: torch.Tensor  # [scores], bf16


@dataclass(frozen=True)
class Rows:
    """The rows of one step's products: consecutive query positions of a request, all heads."""

    query: torch.Tensor  # [s*h, c+r], as multiplied
    limits: torch.Tensor  # [s], the tokens each position sees, all at least 1


@dataclass(frozen=True)
class Partial:
    """Contribution of some tokens of a request to some rows; lse -inf where there is none."""

    out: torch.Tensor  # [s*h, c]
    lse: torch.Tensor  # [s*h]


def has_bf16_matmul() -> bool:
    """Return True where the CPU multiplies bf16 matrices in hardware (AMX)."""
    return torch._C._has_mkldnn and torch.cpu._is_amx_tile_supported()


def product_dtype(sizes: Sizes) -> torch.dtype:
    """Return the dtype of products; an fp8 cache's scales, one per token, need float32."""
    in_bf16 = sizes.dtype == sizes.kv_dtype == torch.bfloat16 and has_bf16_matmul()
    return torch.bfloat16 if in_bf16 else torch.float32


def queries_per_step(sizes: Sizes) -> int:
    """Return the query positions whose rows share a product."""
    return max(1, min(sizes.max_q_len, MAX_ROWS // sizes.heads))


def gathered_tokens(sizes: Sizes) -> int:
    """Return whole pages of tokens: all of a request, at most MAX_TOKENS or one page."""
    pages = -(-sizes.kv_tokens // sizes.page)
    return max(1, min(pages, MAX_TOKENS // sizes.page)) * sizes.page


def tokens_per_step(sizes: Sizes) -> int:
    """Return whole pages of tokens that can be gathered and have scores."""
    fitting = MAX_SCORES // (queries_per_step(sizes) * sizes.heads * sizes.page) * sizes.page
    return max(sizes.page, min(gathered_tokens(sizes), fitting))


def layout(sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of `Scratch`, in its order; no smaller for larger sizes."""
    tokens, width = gathered_tokens(sizes), sizes.latent + sizes.rope
    rows = queries_per_step(sizes) * sizes.heads
    product = product_dtype(sizes)
    scores = max(rows * sizes.page, min(rows * tokens, MAX_SCORES))
    return [
        ((tokens, width), sizes.kv_dtype),
        ((0 if product == sizes.kv_dtype else tokens, width), product),
        ((scores,), torch.float32),
        ((scores,), torch.float32),
        ((scores if product == torch.bfloat16 else 0,), torch.bfloat16),
    ]


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    return sum(array_bytes(shape, dtype) for shape, dtype in layout(sizes))


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [T, h, c] and lse [T, h]; `buffer` has at least `workspace_bytes` bytes."""
    sizes = inputs.sizes
    allocator = BumpAllocator(buffer)
    scratch = Scratch(*(allocator.take(shape, dtype) for shape, dtype in layout(sizes)))
    query = torch.cat([inputs.q_latent, inputs.q_rope], dim=-1).to(product_dtype(sizes))
    starts, kv_lens = inputs.cu_q.tolist(), inputs.kv_lens.tolist()
    step = queries_per_step(sizes)
    for request, kv_len in enumerate(kv_lens):
        start, end = starts[request], starts[request + 1]
        seeing = min(end, max(start, end - kv_len))  # rows before it see no token
        if seeing > start:
            out[start:seeing] = 0
            lse[start:seeing] = -torch.inf
        for first in range(seeing, end, step):
            last = min(first + step, end)
            limits = torch.arange(kv_len - (end - 1 - first), kv_len - (end - 1 - last))
            rows = Rows(query[first:last].flatten(0, 1), limits)
            whole = attend_rows(inputs, scratch, request, rows)
            out[first:last] = whole.out.view_as(out[first:last])
            lse[first:last] = whole.lse.view_as(lse[first:last])


def attend_rows(inputs: Inputs, scratch: Scratch, request: int, rows: Rows) -> Partial:
    """Attend from some rows of a request to every token they see, step by step."""
    kv_len, step = int(rows.limits[-1]), tokens_per_step(inputs.sizes)
    partials: list[Partial] = []
    for first in range(0, kv_len, step):
        span = (first, min(first + step, kv_len))
        tokens, token_scale = gather(inputs, scratch, request, span)
        partials.append(
            attend_step(
                rows, tokens, first=first, inputs=inputs, token_scale=token_scale, scratch=scratch
            )
        )
        partials = [merged(partials)]
    return partials[0]


def merged(partials: list[Partial]) -> Partial:
    """Return the contribution of all steps; every row sees a token in some of them."""
    if len(partials) == 1:
        return partials[0]
    lse = torch.stack([partial.lse for partial in partials])
    weights = torch.softmax(lse, 0).unsqueeze(-1)  # [p, s*h, 1]
    outs = zip(partials, weights, strict=True)
    return Partial(sum(partial.out * weight for partial, weight in outs), lse.logsumexp(0))


def attend_step(
    rows: Rows,
    tokens: torch.Tensor,
    first: int,
    inputs: Inputs,
    token_scale: torch.Tensor | None,
    scratch: Scratch,
) -> Partial:
    """Attend to `tokens`, the first of which is token `first` of the request."""
    shape = len(rows.query), len(tokens)
    count = shape[0] * shape[1]
    by_token = scratch.probs[:count].view(shape[::-1])  # [t, s*h]: tokens first is faster
    multiply_scores(tokens, rows.query, scratch, by_token)
    factor = inputs.scale if token_scale is None else token_scale * inputs.scale
    scores = torch.mul(by_token.t(), factor, out=scratch.scores[:count].view(shape))  # [s*h, t]
    seen = max(0, int(rows.limits[0]) - first)  # by every row; only columns past it are masked
    if seen < len(tokens):
        past = torch.arange(first + seen, first + len(tokens)) >= rows.limits[:, None]
        scores.view(len(past), -1, len(tokens))[:, :, seen:].masked_fill_(past[:, None], MASKED)
    probs = torch.softmax(scores, dim=1, out=scratch.probs[:count].view(shape))
    # The largest probability is exp(largest score - lse): two cheap reductions instead of a sum
    # of exponentials.
    lse = scores.amax(1).sub_(probs.amax(1).log_())
    if not seen:
        lse.view(len(rows.limits), -1)[rows.limits <= first] = -torch.inf
    if token_scale is not None:
        probs *= token_scale
    if tokens.dtype == torch.bfloat16:
        probs = scratch.rounded[:count].view_as(probs).copy_(probs)
    out = torch.mm(probs, tokens[:, : inputs.sizes.latent])
    return Partial(out, lse)


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
    stored = scratch.rounded[: scores.numel()].view_as(scores)
    widened = scratch.scores[: scores.numel()].view_as(scores)
    torch.mm(tokens, query.t(), out=stored)
    scores.copy_(stored)
    stored.addmm_(tokens, query.t(), beta=-1)
    scores.add_(widened.copy_(stored))  # adding bf16 to float32 would allocate the copy


def gather(
    inputs: Inputs, scratch: Scratch, request: int, span: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens of `span` as products take them, and their scales; it starts a page."""
    page, count = inputs.sizes.page, span[1] - span[0]
    pages = inputs.page_table[request, span[0] // page : -(-span[1] // page)]
    ids, scale = pages.tolist(), None
    if ids == list(range(ids[0], ids[0] + len(ids))):  # they lie in a row: no copy
        tokens = inputs.kv_cache[ids[0] : ids[0] + len(ids)].flatten(0, 1)
    else:
        tokens = scratch.gathered[: len(ids) * page]
        word = word_of(inputs.kv_cache)
        torch.index_select(
            inputs.kv_cache.flatten(1).view(word), 0, pages,
            out=tokens.view(len(ids), -1).view(word),
        )  # fmt: skip
    tokens = tokens[:count]
    if scratch.converted.numel():
        tokens = scratch.converted[:count].copy_(tokens)
    if inputs.kv_scale is not None:
        scale = inputs.kv_scale.index_select(0, pages).flatten()[:count]
    return tokens, scale


def word_of(kv_cache: torch.Tensor) -> torch.dtype:
    """Return the dtype to copy pages as: torch copies 8 bytes as fast as 1 or 2."""
    page_bytes = kv_cache[0].numel() * kv_cache.element_size()
    start_bytes = kv_cache.storage_offset() * kv_cache.element_size()
    return torch.uint8 if page_bytes % 8 or start_bytes % 8 else torch.int64
