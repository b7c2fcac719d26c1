"""Cases of verification attention, with poison wherever a kernel must not look."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from mtp_kernels.verify_attention import verify_attention

JUNK_PAGE = 2**31 - 1
FP8 = torch.float8_e4m3fn
# Largest relative error of the whole output, by dtype; of a single row's, four times that.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LSE_TOLERANCE = {torch.bfloat16: 1e-4, torch.float16: 1e-5, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """One ragged batch: q_lens and kv_lens by request."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 16
    latent: int = 32
    rope: int = 16
    page: int = 16
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    parts: int | None = None  # triton_cuda only
    seed: int = 0


def build(case: Case) -> dict[str, Any]:
    """The arguments of `verify_attention`: permuted pages, NaN in every unused cache slot and
    scale, and a page id past the cache wherever a table has no page."""
    generator = torch.Generator().manual_seed(case.seed)
    width, queries = case.latent + case.rope, sum(case.q_lens)
    counts = [-(-kv_len // case.page) for kv_len in case.kv_lens]
    table_width = max(counts, default=0) + 2
    total = sum(counts) + 3
    order = torch.randperm(total, generator=generator).to(torch.int32)
    cache = torch.full((total, case.page, width), torch.nan)
    page_table = torch.full((len(counts), table_width), JUNK_PAGE, dtype=torch.int32)
    for request, (count, kv_len) in enumerate(zip(counts, case.kv_lens, strict=True)):
        first = sum(counts[:request])
        pages = order[first : first + count]
        page_table[request, :count] = pages
        tokens = torch.full((count * case.page, width), torch.nan)
        tokens[:kv_len] = torch.randn(kv_len, width, generator=generator)
        cache[pages.long()] = tokens.view(count, case.page, width)
    kv_scale = None
    if case.fp8:
        kv_scale = cache.abs().amax(-1) / torch.finfo(FP8).max
        cache = cache / kv_scale[..., None]
    return {
        "q_latent": torch.randn(queries, case.heads, case.latent, generator=generator).to(
            case.dtype
        ),
        "q_rope": torch.randn(queries, case.heads, case.rope, generator=generator).to(case.dtype),
        "kv_cache": cache.to(FP8 if case.fp8 else case.dtype),
        "page_table": page_table,
        "kv_lens": torch.tensor(case.kv_lens, dtype=torch.int32),
        "cu_q": torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32),
        "scale": 1.5 * width**-0.5,
        "kv_scale": kv_scale,
    }


def reference(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 result on the same stored values."""
    wide = dict(arguments)
    for name in ("q_latent", "q_rope"):
        wide[name] = wide[name].float()
    if wide["kv_scale"] is None:
        wide["kv_cache"] = wide["kv_cache"].float()
    return verify_attention(**wide, backend="reference")


def check(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Compare a result with the reference, over the whole output and row by row."""
    want_out, want_lse = reference(build(case))
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    sees = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), sees), "rows that see no token have lse -inf"
    assert (lse[~sees] == -torch.inf).all() and (out[~sees] == 0).all()
    if not sees.any():
        return
    error, norm = (out.double() - want_out).norm(dim=-1), want_out.double().norm(dim=-1)
    tolerance = TOLERANCE[case.dtype]
    assert error[sees].norm() <= tolerance * norm[sees].norm()
    assert (error[sees] <= 4 * tolerance * norm[sees]).all()
    torch.testing.assert_close(lse[sees], want_lse[sees], rtol=0, atol=LSE_TOLERANCE[case.dtype])


def expanded(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same queries, each as a request of its own with q_len 1: batch expansion."""
    starts, kv_lens = arguments["cu_q"].tolist(), arguments["kv_lens"].tolist()
    owners, lengths = [], []
    for request, kv_len in enumerate(kv_lens):
        q_len = starts[request + 1] - starts[request]
        owners += [request] * q_len
        lengths += [max(0, kv_len - (q_len - 1 - row)) for row in range(q_len)]
    return arguments | {
        "page_table": arguments["page_table"][owners],
        "kv_lens": torch.tensor(lengths, dtype=torch.int32),
        "cu_q": torch.arange(len(owners) + 1, dtype=torch.int32),
    }


def reordered(case: Case, order: list[int]) -> tuple[Case, torch.Tensor]:
    """The case with its requests in another order, and where its rows come from."""
    starts = [0, *accumulate(case.q_lens)]
    rows = [row for request in order for row in range(starts[request], starts[request + 1])]
    q_lens = tuple(case.q_lens[request] for request in order)
    kv_lens = tuple(case.kv_lens[request] for request in order)
    return replace(case, q_lens=q_lens, kv_lens=kv_lens), torch.tensor(rows, dtype=torch.long)


def rearranged(case: Case, order: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """The case's arguments, the very same rows and pages, by requests in another order; and where
    the rows come from."""
    arguments = build(case)
    moved, rows = reordered(case, order)
    return arguments | {
        "q_latent": arguments["q_latent"][rows],
        "q_rope": arguments["q_rope"][rows],
        "page_table": arguments["page_table"][order],
        "kv_lens": torch.tensor(moved.kv_lens, dtype=torch.int32),
        "cu_q": build(moved)["cu_q"],
    }, rows


def lengths_around(q_len: int, page: int) -> tuple[int, ...]:
    """Cache lengths at every edge: none, about q_len, about 64, and every remainder of a page."""
    edges = (0, q_len - 1, q_len, q_len + 1, 63, 64, 65)
    return (*edges, *(2 * page + rest for rest in range(q_len + 1)))
