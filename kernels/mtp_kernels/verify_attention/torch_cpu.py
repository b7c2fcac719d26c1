"""Verification attention with torch on a CPU: a request's queries x heads share each matmul.

A request's cached tokens are read once, whatever its q_len, and every product has all its rows;
only the last columns, where the rows' limits differ, are masked. Where the CPU has bf16 matrix
units (AMX) and queries and cache are bf16, torch's flash kernel multiplies them in blocks that stay
in the processor's cache; elsewhere products are float32. What different tokens contribute is merged
by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_kernels.verify_attention.inputs import Carver, Inputs, Sizes, array_bytes

# Tokens gathered at a time, and the most float32 scores [rows, tokens] at a time. Rows are at most
# MAX_ROWS (long groups, as in prefill, go in blocks of queries): scratch memory is bounded.
MAX_TOKENS = 4096
MAX_SCORES = 1 << 19
MAX_ROWS = 2048
MASKED = -1e30  # finite: the softmax of a fully masked row is finite, and then has no weight

# The flash kernel works on FLASH_ROWS rows at a time. Given more, it packs all tokens first, in
# memory that it allocates: worth it from PACKED_ROWS on, and for up to PACKED_TOKENS, beyond which
# the allocator returns that memory after each call and page faults take longer than the products.
FLASH_ROWS = 32
PACKED_ROWS = 96
PACKED_TOKENS = 2048
PACKED_PARTS = 4
MIN_PART_TOKENS = 256
PART_MULTIPLE = 32


@dataclass(frozen=True)
class Scratch:
    """Reused memory of the steps."""

    gathered: torch.Tensor  # [tokens, c+r], as stored
    converted: torch.Tensor  # [tokens, c+r], float32
    scores: torch.Tensor  # [scores], float32
    probs: torch.Tensor  # [scores], float32


@dataclass(frozen=True)
class Rows:
    """The rows of one step's products: consecutive query positions of a request, all heads."""

    query: torch.Tensor  # [s*h, c+r], as multiplied
    limits: torch.Tensor  # [s], the tokens each position sees, all at least 1


@dataclass(frozen=True)
class Partial:
    """What some ranges p of a request's tokens contribute to some rows; lse -inf where nothing."""

    out: torch.Tensor  # [p, s*h, c]
    lse: torch.Tensor  # [p, s*h]


def has_bf16_matmul() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AMX)."""
    return torch._C._has_mkldnn and torch.cpu._is_amx_tile_supported()


def product_dtype(sizes: Sizes) -> torch.dtype:
    """What is multiplied; an fp8 cache's scales, one a token, go with float32 products only."""
    in_bf16 = sizes.dtype == sizes.kv_dtype == torch.bfloat16 and has_bf16_matmul()
    return torch.bfloat16 if in_bf16 else torch.float32


def queries_per_step(sizes: Sizes) -> int:
    return max(1, min(sizes.max_q_len, MAX_ROWS // sizes.heads))


def gathered_tokens(sizes: Sizes) -> int:
    """A whole number of pages: all of a request's tokens, at most MAX_TOKENS or one page."""
    pages = -(-sizes.kv_tokens // sizes.page)
    return max(1, min(pages, MAX_TOKENS // sizes.page)) * sizes.page


def tokens_per_step(sizes: Sizes) -> int:
    """A whole number of pages: what can be gathered and, of float32 products, has scores."""
    if product_dtype(sizes) == torch.bfloat16:
        return gathered_tokens(sizes)
    fitting = MAX_SCORES // (queries_per_step(sizes) * sizes.heads * sizes.page) * sizes.page
    return max(sizes.page, min(gathered_tokens(sizes), fitting))


def layout(sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of `Scratch`, in its order; no smaller for larger sizes."""
    tokens, width = gathered_tokens(sizes), sizes.latent + sizes.rope
    rows = queries_per_step(sizes) * sizes.heads
    product = product_dtype(sizes)
    scores = 0
    if product == torch.float32:
        scores = max(rows * sizes.page, min(rows * tokens, MAX_SCORES))
    return [
        ((tokens, width), sizes.kv_dtype),
        ((0 if product == sizes.kv_dtype else tokens, width), product),
        ((scores,), torch.float32),
        ((scores,), torch.float32),
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
        if rows.query.dtype == torch.bfloat16:
            partials += flash_step(rows, tokens, first, inputs)
        else:
            partials.append(float32_step(rows, tokens, first, inputs, token_scale, scratch))
        partials = [merged(partials)]
    return partials[0]


def merged(partials: list[Partial]) -> Partial:
    """The contribution of all ranges together, p = 1; every row sees a token in some of them."""
    if len(partials) == 1 and len(partials[0].lse) == 1:
        return partials[0]
    lse = torch.cat([partial.lse for partial in partials])
    weights = torch.softmax(lse, 0).unsqueeze(-1)  # [p, s*h, 1]
    counts = [len(partial.lse) for partial in partials]
    out = [
        (partial.out * weight).sum(0, keepdim=True)
        for partial, weight in zip(partials, torch.split_with_sizes(weights, counts), strict=True)
    ]
    return Partial(sum(out[1:], out[0]), lse.logsumexp(0, keepdim=True))


def flash_step(rows: Rows, tokens: torch.Tensor, first: int, inputs: Inputs) -> list[Partial]:
    """Attend to bf16 `tokens`, the first of which is token `first` of the request.

    What every row sees goes in parts that threads share, without a mask, the rest in one with it.
    """
    count = len(rows.query)
    packed = count >= PACKED_ROWS
    threads = torch.get_num_threads()
    chunk = PACKED_TOKENS if packed else MAX_TOKENS
    most_parts = max(PACKED_PARTS if packed else threads, threads * FLASH_ROWS // count)
    query = blocks(rows.query, count if packed else FLASH_ROWS)
    seen = max(0, min(int(rows.limits[0]) - first, len(tokens)))
    done, partials = 0, []
    while seen - done >= MIN_PART_TOKENS:
        size = min(chunk, seen - done)
        parts = min(most_parts, size // MIN_PART_TOKENS)
        part = size // parts // PART_MULTIPLE * PART_MULTIPLE
        keys = tokens[done : done + parts * part].view(parts, part, -1)
        partials.append(flash(query, keys, inputs))
        done += parts * part
    if done < len(tokens):
        partials.append(flash(query, tokens[None, done:], inputs, rows, first + done))
    return partials


def blocks(tensor: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[first : first + rows] for first in range(0, len(tensor), rows))


def flash(
    query: tuple[torch.Tensor, ...],  # each [some of s*h, c+r]
    keys: torch.Tensor,  # [p, t, c+r]
    inputs: Inputs,
    rows: Rows | None = None,
    first: int = 0,
) -> Partial:
    """Attend from every row to every token; given `rows`, mask by their limits from `first` on.

    The kernel takes values as wide as keys: the last r columns of its output mean nothing.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    unseen = None if rows is None else unseen_tokens(rows, first, first + keys.shape[1])
    masks: tuple[torch.Tensor | None, ...] = (None,) * len(query)
    if unseen is not None:
        mask = torch.zeros(unseen.shape, dtype=keys.dtype).masked_fill_(unseen, -torch.inf)
        masks = blocks(mask.repeat_interleave(inputs.sizes.heads, 0), len(query[0]))
    keys = keys[None]
    results = [
        attend(
            some.expand(1, keys.shape[1], -1, -1), keys, keys, attn_mask=mask, scale=inputs.scale
        )
        for some, mask in zip(query, masks, strict=True)
    ]
    out = torch.cat([result[0][0] for result in results], 1) if len(query) > 1 else results[0][0][0]
    lse = torch.cat([result[1][0] for result in results], 1) if len(query) > 1 else results[0][1][0]
    if unseen is not None:  # the kernel says 0 for a row that sees nothing
        lse.view(len(unseen), -1)[unseen[:, 0]] = -torch.inf
    return Partial(out[..., : inputs.sizes.latent], lse)


def unseen_tokens(rows: Rows, start: int, end: int) -> torch.Tensor | None:
    """Which of the tokens start to end are past each position's limit [s, t]; None: not one is."""
    if int(rows.limits[0]) >= end:
        return None
    return torch.arange(start, end) >= rows.limits[:, None]


def float32_step(
    rows: Rows,
    tokens: torch.Tensor,
    first: int,
    inputs: Inputs,
    token_scale: torch.Tensor | None,
    scratch: Scratch,
) -> Partial:
    """Attend to float32 `tokens`, the first of which is token `first` of the request."""
    shape = len(rows.query), len(tokens)
    count = shape[0] * shape[1]
    by_token = scratch.probs[:count].view(shape[::-1])  # [t, s*h]: tokens first is faster
    torch.mm(tokens, rows.query.t(), out=by_token)
    factor = inputs.scale if token_scale is None else token_scale * inputs.scale
    scores = torch.mul(by_token.t(), factor, out=scratch.scores[:count].view(shape))  # [s*h, t]
    unseen = unseen_tokens(rows, first, first + len(tokens))
    if unseen is not None:
        seen = max(0, int(rows.limits[0]) - first)
        columns = scores.view(len(unseen), -1, len(tokens))[:, :, seen:]
        columns.masked_fill_(unseen[:, None, seen:], MASKED)
    probs = torch.softmax(scores, dim=1, out=scratch.probs[:count].view(shape))
    # The largest probability is exp(largest score - lse): two cheap reductions instead of a sum
    # of exponentials.
    lse = scores.amax(1).sub_(probs.amax(1).log_())
    if unseen is not None:
        lse.view(len(unseen), -1)[unseen[:, 0]] = -torch.inf
    if token_scale is not None:
        probs *= token_scale
    out = torch.mm(probs, tokens[:, : inputs.sizes.latent])
    return Partial(out[None], lse[None])


def gather(
    inputs: Inputs, scratch: Scratch, request: int, span: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens of `span` as the products take them, and their scales; `span` starts a page."""
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
    """What to copy pages as: torch copies 8 bytes at a time as fast as it copies 1 or 2."""
    page_bytes = kv_cache[0].numel() * kv_cache.element_size()
    start_bytes = kv_cache.storage_offset() * kv_cache.element_size()
    return torch.uint8 if page_bytes % 8 or start_bytes % 8 else torch.int64
