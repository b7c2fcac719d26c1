"""The Triton kernels of verification attention: plan, attend, combine.

Letters as everywhere: b batch, h head, c latent, r rope, t key position. A request's query
positions and heads form rows, row = position * HEADS + head, cut into tiles of ROWS rows; its
cached tokens are cut into blocks of TOKENS tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtp_kernels.gpu.triton_kernels import from_fp8

# Where a row's largest score starts: below every score, and finite, so that a masked score (-inf)
# less it is -inf, whose exponential is 0; -inf less -inf would be NaN.
LOWEST = tl.constexpr(-1.0e30)
LN_2 = tl.constexpr(0.6931471805599453)
PLANNED = tl.constexpr(16)  # parts whose requests a program of plan_kernel looks up


@triton.jit(do_not_specialize=["batch", "parts"])
def plan_kernel(
    kv_lens, cu_q, starts, part_requests, share_out, batch, parts,
    BATCH_POW2: tl.constexpr, TOKENS: tl.constexpr, MIN_SHARE: tl.constexpr,
):  # fmt: skip
    """Deal the batch's blocks to the parts, PLANNED of them per program; no host.

    All blocks lie in one row, request after request, and part p takes the blocks from p * share to
    (p + 1) * share. If a share slightly above the smallest (4 blocks, or an eighth) lets every
    request begin a part of its own, requests are padded to whole shares: no part then serves two
    requests, and a request of one share is stored without combining.
    """
    b = tl.arange(0, BATCH_POW2)
    exists = b < batch
    kv_len = tl.load(kv_lens + b, mask=exists, other=0)
    q_len = tl.load(cu_q + b + 1, mask=exists, other=0) - tl.load(cu_q + b, mask=exists, other=0)
    # At least one block, empty if need be, so that rows that see no token are written too.
    blocks = tl.where(q_len > 0, tl.maximum(tl.cdiv(kv_len, TOKENS), 1), 0)

    share = tl.maximum(tl.cdiv(tl.sum(blocks), parts), MIN_SHARE)
    step = tl.maximum(share // 32, 1)
    padded = blocks
    candidate = share + 4 * step
    for _ in range(5):  # from the largest to the smallest: the last that fits stays
        whole_shares = tl.cdiv(blocks, candidate)
        fits = tl.sum(whole_shares) <= parts
        padded = tl.where(fits, whole_shares * candidate, padded)
        share = tl.where(fits, candidate, share)
        candidate -= step

    ends = tl.cumsum(padded)
    if tl.program_id(0) == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + b, ends, mask=exists)
        tl.store(share_out, share)
    # A part's requests: from the number that end by its first block to the number that start
    # before its last.
    part = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    ended = (ends[None, :] <= (part * share)[:, None]) & exists[None, :]
    begun = ((ends - padded)[None, :] < ((part + 1) * share)[:, None]) & exists[None, :]
    first_request = tl.sum(ended.to(tl.int32), 1)
    end_request = tl.sum(begun.to(tl.int32), 1)
    tl.store(part_requests + part * 2, first_request, mask=part < parts)
    tl.store(part_requests + part * 2 + 1, end_request, mask=part < parts)


@triton.jit
def load_block(
    kv_cache, kv_scale, page_ids, page, t, t_end, LATENT: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The tokens from t on as numbers: latent [t, c], rope [t, r], scale [t].

    They lie in one page, or, where pages are no multiple of a block, wherever their pages are. The
    last token replaces those past t_end, whose slots may hold anything, NaN too: they are masked
    later. Cheaper in registers than masked loads.
    """
    offset = tl.minimum(tl.arange(0, TOKENS), t_end - t - 1)
    if PAGE % TOKENS == 0:
        slot = page.to(tl.int64) * PAGE + t % PAGE
    else:
        slot = 0
        pages = tl.load(page_ids + (t + offset) // PAGE)
        offset = pages.to(tl.int64) * PAGE + (t + offset) % PAGE
    width = LATENT + ROPE
    block = kv_cache + slot * width  # one 64-bit address; everything inside a page is 32-bit
    latent = tl.load(block + (offset[:, None] * width + tl.arange(0, LATENT)[None, :]))
    rope = tl.load(block + (offset[:, None] * width + (LATENT + tl.arange(0, ROPE))[None, :]))
    scale = tl.load(kv_scale + slot + offset) if FP8 else 1.0
    return latent, rope, scale


@triton.jit
def attend_block(
    q_latent, q_rope, limit, t, latent, rope, token_scale, acc, peak, total, scale_log2,
    TOKENS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Attend from rows, which see tokens below their limit, to the block of tokens from t on."""
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    scores *= scale_log2
    if FP8:
        scores *= token_scale[None, :]
    token = t + tl.arange(0, TOKENS)
    scores = tl.where(token[None, :] < limit[:, None], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    probs = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(probs, 1)
    if FP8:
        probs *= token_scale[None, :]
    acc = acc * shrink[:, None]
    acc = tl.dot(probs.to(latent.dtype), latent, acc, input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def attend_range(
    q_latent, q_rope, limit, kv_cache, page_ids, t_start, t_end, scale_log2, ROWS: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of rows to tokens t_start to t_end.

    Returns the sums of values [row, c], the largest scores [row] and the sums of weights [row].
    """
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # The next block's page id is loaded one block ahead: a load of it and of its block in the same
    # iteration would be two dependent loads, and the second could not be started early.
    page = tl.load(page_ids + t_start // PAGE, mask=t_start < t_end, other=0)
    for t in tl.range(t_start, t_end, TOKENS, num_stages=STAGES):
        t_next = t + TOKENS
        next_page = tl.load(page_ids + t_next // PAGE, mask=t_next < t_end, other=0)
        latent, rope, token_scale = load_block(
            kv_cache, None, page_ids, page, t, t_end, LATENT, ROPE, PAGE, TOKENS, False
        )
        acc, peak, total = attend_block(
            q_latent, q_rope, limit, t, latent, rope, token_scale, acc, peak, total, scale_log2,
            TOKENS, False,
        )  # fmt: skip
        page = next_page
    return acc, peak, total


@triton.jit
def attend_fp8_range(
    q_latent, q_rope, limit, kv_cache, kv_scale, page_ids, t_start, t_end, scale_log2,
    ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """As attend_range, of a cache of codes.

    A block is loaded into registers while the one before is multiplied: Triton pipelines no load
    whose codes two products share, but waits for it in every iteration.
    """
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if t_start < t_end:
        page = tl.load(page_ids + t_start // PAGE)
        codes, rope_codes, token_scale = load_block(
            kv_cache, kv_scale, page_ids, page, t_start, t_end, LATENT, ROPE, PAGE, TOKENS, True
        )
        # Past the end the last token is loaded, and not used.
        page = tl.load(page_ids + tl.minimum(t_start + TOKENS, t_end - 1) // PAGE)
        latent = from_fp8(codes, q_latent.dtype)
        rope = from_fp8(rope_codes, q_rope.dtype)
        for t in tl.range(t_start, t_end, TOKENS, num_stages=1):
            t_next = tl.minimum(t + TOKENS, t_end - 1)
            codes, rope_codes, next_scale = load_block(
                kv_cache, kv_scale, page_ids, page, t_next, t_end, LATENT, ROPE, PAGE, TOKENS, True
            )
            page = tl.load(page_ids + tl.minimum(t + 2 * TOKENS, t_end - 1) // PAGE)
            acc, peak, total = attend_block(
                q_latent, q_rope, limit, t, latent, rope, token_scale, acc, peak, total,
                scale_log2, TOKENS, True,
            )  # fmt: skip
            latent = from_fp8(codes, q_latent.dtype)
            rope = from_fp8(rope_codes, q_rope.dtype)
            token_scale = next_scale
    return acc, peak, total


@triton.jit
def finished(acc, peak, total):
    """Out [row, c] and lse [row] in base 2: 0 and -inf of rows that saw no token."""
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    return out, tl.where(empty, -float("inf"), peak + tl.log2(total))


@triton.jit
def load_rows(
    q_latent, q_rope, at, exists, LATENT: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    """The query rows `at`: latent [row, c] and rope [row, r], 0 where a row does not exist."""
    c = tl.arange(0, LATENT)[None, :]
    r = tl.arange(0, ROPE)[None, :]
    latent = tl.load(q_latent + at[:, None] * LATENT + c, mask=exists[:, None], other=0.0)
    rope = tl.load(q_rope + at[:, None] * ROPE + r, mask=exists[:, None], other=0.0)
    return latent, rope


@triton.jit
def store_rows(out, lse, at, exists, values, row_lse, LATENT: tl.constexpr):
    c = tl.arange(0, LATENT)[None, :]
    tl.store(out + at[:, None] * LATENT + c, values, mask=exists[:, None])
    tl.store(lse + at, row_lse, mask=exists)


@triton.jit(do_not_specialize=["max_pages"])  # which grows with the longest request
def attend_kernel(
    q_latent, q_rope, kv_cache, kv_scale, page_table, kv_lens, cu_q, scale_log2,
    starts, part_requests, share_in, out, lse, part_out, part_lse, max_pages, max_rows,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (tile of rows, part): the blocks of its part, request by request.

    The tiles of a part have neighbouring program ids: they read the same blocks at about the same
    time, so that all reads but one are served by the L2 cache.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first_request = tl.load(part_requests + part * 2)
    end_request = tl.load(part_requests + part * 2 + 1)
    # Without disable_licm, offsets of rows and tokens that are the same for every request would be
    # held in registers across this loop, some 70 per thread, and spill.
    for request in tl.range(first_request, end_request, disable_licm=True):
        share = tl.load(share_in)
        begin, start = part * share, tl.load(starts + request)
        q_start = tl.load(cu_q + request)
        rows = (tl.load(cu_q + request + 1) - q_start) * HEADS
        kv_len = tl.load(kv_lens + request)
        blocks = tl.maximum(tl.cdiv(kv_len, TOKENS), 1)
        first = tl.maximum(begin - start, 0)
        last = tl.minimum(begin + share - start, blocks)
        if (tile * ROWS < rows) & (first < last):
            row = tile * ROWS + tl.arange(0, ROWS)
            exists = row < rows
            at = q_start.to(tl.int64) * HEADS + row
            query, query_rope = load_rows(q_latent, q_rope, at, exists, LATENT, ROPE)
            # Position i of q_len sees kv_len - (q_len - 1 - i) tokens.
            limit = tl.where(exists, kv_len - rows // HEADS + 1 + row // HEADS, 0)
            t_start, t_end = first * TOKENS, tl.minimum(last * TOKENS, tl.max(limit))
            page_ids = page_table + request * max_pages
            if FP8:
                acc, peak, total = attend_fp8_range(
                    query, query_rope, limit, kv_cache, kv_scale, page_ids, t_start, t_end,
                    scale_log2, ROWS, LATENT, ROPE, PAGE, TOKENS,
                )  # fmt: skip
            else:
                acc, peak, total = attend_range(
                    query, query_rope, limit, kv_cache, page_ids, t_start, t_end, scale_log2,
                    ROWS, LATENT, ROPE, PAGE, TOKENS, STAGES,
                )  # fmt: skip
            acc, acc_lse = finished(acc, peak, total)
            if (first == 0) & (last == blocks):
                store_rows(out, lse, at, exists, acc, acc_lse * LN_2, LATENT)
            else:
                # A part ends at most one request begun before it, and begins at most one that goes
                # on after it: two slots per part.
                slot = part * 2 + (first == 0).to(tl.int32)
                at = slot.to(tl.int64) * max_rows + row
                store_rows(part_out, part_lse, at, exists, acc, acc_lse, LATENT)


@triton.jit
def combine_kernel(
    kv_lens, cu_q, starts, share_in, out, lse, part_out, part_lse, max_rows,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per (ROWS rows, request): merge what the parts of a split request stored."""
    request = tl.program_id(1)
    q_start = tl.load(cu_q + request)
    rows = (tl.load(cu_q + request + 1) - q_start) * HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    share = tl.load(share_in)
    start = tl.load(starts + request)
    blocks = tl.maximum(tl.cdiv(tl.load(kv_lens + request), TOKENS), 1)
    first_part = start // share
    last_part = (start + blocks - 1) // share
    if (tl.program_id(0) * ROWS < rows) & (first_part < last_part):
        exists = row < rows
        c = tl.arange(0, LATENT)[None, :]
        acc = tl.zeros([ROWS, LATENT], tl.float32)
        peak = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for part in range(first_part, last_part + 1):
            slot = part * 2 + (part == first_part).to(tl.int32)
            at = slot.to(tl.int64) * max_rows + row
            part_peak = tl.load(part_lse + at, mask=exists, other=-float("inf"))
            new_peak = tl.maximum(peak, part_peak)
            weight = tl.exp2(part_peak - new_peak)
            shrink = tl.exp2(peak - new_peak)
            values = tl.load(part_out + at[:, None] * LATENT + c, mask=exists[:, None], other=0.0)
            acc = acc * shrink[:, None] + values * weight[:, None]
            total = total * shrink + weight
            peak = new_peak
        at = q_start.to(tl.int64) * HEADS + row
        acc, acc_lse = finished(acc, peak, total)
        store_rows(out, lse, at, exists, acc, acc_lse * LN_2, LATENT)
