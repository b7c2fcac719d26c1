"""Other implementations of the same attention, where they can be imported.

Each takes the arguments of the fused call and gives a call of its own, made ready beforehand. They
are called as their own documentation has it; what they raise is noted beside their name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.common.attention_shapes import LATENT, PAGE, ROPE, Shape, sdpa_call

Call = Callable[[], object]
SDPA_SCORES = 1 << 28  # most scores: torch holds all of them where no fast path takes 576 columns


def sdpa(arguments: dict[str, Any], shape: Shape) -> Call:
    """Gather the pages, then torch's attention on our blocks of rows."""
    scores = shape.batch * shape.queries * shape.heads * shape.tokens
    if scores > SDPA_SCORES:
        raise ValueError(f"expected at most {SDPA_SCORES} scores, found {scores}")
    return sdpa_call(arguments, shape, torch.empty_like(arguments["kv_cache"]), True)


def flash_mla(arguments: dict[str, Any], shape: Shape) -> Call:
    """FlashMLA: q [b, s, h, c+r], cache [pages, 64, 1, c+r]; its schedule is made beforehand."""
    module = import_module("flash_mla")
    query = torch.cat([arguments["q_latent"], arguments["q_rope"]], -1)
    query = query.view(shape.batch, shape.queries, shape.heads, LATENT + ROPE)
    cache = arguments["kv_cache"].view(-1, PAGE, 1, LATENT + ROPE)
    schedule, splits = module.get_mla_metadata(arguments["kv_lens"], shape.queries * shape.heads, 1)
    return lambda: module.flash_mla_with_kvcache(
        query,
        cache,
        arguments["page_table"],
        arguments["kv_lens"],
        LATENT,
        schedule,
        splits,
        softmax_scale=arguments["scale"],
        causal=True,
    )


def flashinfer(arguments: dict[str, Any], shape: Shape) -> Call:
    """FlashInfer's paged MLA: latents and rope keys apart, pages of all requests in one list."""
    module = import_module("flashinfer.mla")
    device = arguments["kv_cache"].device
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = module.BatchMLAPagedAttentionWrapper(scratch, backend="auto")
    pages = -(-arguments["kv_lens"] // PAGE)
    starts = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    columns = torch.arange(arguments["page_table"].shape[1], device=device)
    used = arguments["page_table"][columns < pages[:, None]]
    dtype = arguments["kv_cache"].dtype
    wrapper.plan(
        arguments["cu_q"], starts, used, arguments["kv_lens"], shape.heads, LATENT, ROPE, PAGE,
        True, arguments["scale"], dtype, dtype,
    )  # fmt: skip
    latent, rope = (
        part.contiguous() for part in arguments["kv_cache"].split([LATENT, ROPE], dim=-1)
    )
    q_latent, q_rope = arguments["q_latent"], arguments["q_rope"]
    return lambda: wrapper.run(q_latent, q_rope, latent, rope, return_lse=True)


PEERS: dict[str, Callable[[dict[str, Any], Shape], Call]] = {
    "sdpa": sdpa,
    "flash_mla": flash_mla,
    "flashinfer": flashinfer,
}


def available() -> list[str]:
    """Return the peers that can be imported; torch always can."""
    return [name for name in PEERS if name == "sdpa" or find_spec(name) is not None]
