"""Verification attention compiled for a CPU: float32, and bf16 in whole tiles.

In float32 a row's bits do not depend on its batch. torch_cpu has the other dtypes and sizes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from mtp_kernels.cpu.matrix_units import TILE
from mtp_kernels.cpu.paged_attention import Keys, Parts, Queries
from mtp_kernels.cpu.team import process_team
from mtp_kernels.verify_attention import compiled_bf16, compiled_float32
from mtp_kernels.verify_attention.bf16_packing import PADDING
from mtp_kernels.verify_attention.bf16_units import DEPTH
from mtp_kernels.verify_attention.compiled_bf16 import STEP_TOKENS
from mtp_kernels.verify_attention.inputs import BumpAllocator, Inputs, Sizes, array_bytes
from mtp_kernels.verify_attention.shares import MAX_ROWS, items_of
from mtp_kernels.verify_attention.tiles import ENTRY_TERMS, SPEEDUP


def takes_bf16(sizes: Sizes) -> bool:
    """Return True for bf16 in sizes of whole tiles."""
    whole = sizes.latent % DEPTH == 0 and sizes.rope % DEPTH == 0
    return whole and sizes.dtype == sizes.kv_dtype == torch.bfloat16


def layout(sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of compiled_bf16.Scratch, not falling with sizes."""
    groups = -(-min(sizes.max_q_len * sizes.heads, max(MAX_ROWS, sizes.heads)) // TILE)
    return scratch_layout(torch.get_num_threads(), groups, sizes.latent, sizes.rope)


@lru_cache
def scratch_layout(
    threads: int, groups: int, latent: int, rope: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    rows, width = groups * TILE, latent + rope
    paired = ENTRY_TERMS == 2
    term = torch.int16 if paired else torch.int32
    return [
        ((threads, rows, width), term),
        ((threads, TILE, width), term),
        ((threads, STEP_TOKENS, width + PADDING), term),
        ((threads, STEP_TOKENS if paired else 0, latent), term),
        ((threads, groups, STEP_TOKENS, TILE), torch.float32),
        ((threads, TILE, TILE), torch.int32),
        ((threads, groups, STEP_TOKENS * TILE), term),
        ((threads, 3, rows, latent), torch.float32),
        ((threads, 3, rows), torch.float32),
        ((threads, 3, rows), torch.float32),
    ]


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    """Return the bytes that bf16 needs; float32 allocates by a call's lengths."""
    if not takes_bf16(sizes):
        return 0
    return sum(array_bytes(shape, dtype) for shape, dtype in layout(sizes))


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [T, h, c] and lse [T, h]."""
    if inputs.kv_cache.dtype == out.dtype == torch.float32:
        attend_float32(inputs, out, lse)
    elif takes_bf16(inputs.sizes):
        attend_bf16(inputs, buffer, out, lse)
    else:
        raise ValueError(
            "backend compiled_cpu: expected float32 queries over a float32 cache, or bfloat16 over "
            f"bfloat16 with latent and rope multiples of {DEPTH}, found {out.dtype} over "
            f"{inputs.kv_cache.dtype} with latent {inputs.sizes.latent} and rope "
            f"{inputs.sizes.rope}; use torch_cpu"
        )


def multiplications(sizes: Sizes) -> int:
    """Return the multiplications of all rows with the longest possible caches."""
    return sizes.queries * sizes.heads * sizes.kv_tokens * 2 * sizes.latent


def attend_float32(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Run `compiled_float32` on the process's threads."""
    sizes = inputs.sizes
    tiles, waves, most, rows = compiled_float32.arrange(
        inputs.cu_q.numpy(), inputs.kv_lens.numpy(), inputs.q_latent.numpy(), inputs.q_rope.numpy()
    )
    scratch = Parts(
        sums=np.empty((most, sizes.latent), np.float32),
        row_max=np.empty(most, np.float32),
        row_sum=np.empty(most, np.float32),
    )
    team = process_team()
    team.run(
        compiled_float32.attend,
        team.threads_for(multiplications(sizes)),
        tiles,
        waves,
        Queries(rows, sizes.heads, np.float32(inputs.scale)),
        Keys(
            cache=inputs.kv_cache.flatten(0, 1).numpy(),
            page_table=inputs.page_table.numpy(),
            page=sizes.page,
            kv_heads=1,
            value_at=0,
        ),
        scratch,
        out.numpy(),
        lse.numpy(),
    )


def attend_bf16(inputs: Inputs, buffer: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Run `compiled_bf16` on the process's threads, in the workspace."""
    sizes, allocator, team = inputs.sizes, BumpAllocator(buffer), process_team()
    scratch = (allocator.take(shape, dtype).numpy() for shape, dtype in layout(sizes))

    def stored(tensor: torch.Tensor) -> np.ndarray:
        return tensor.flatten(0, 1).view(torch.int16).numpy()

    problem = compiled_bf16.Problem(
        q_latent=stored(inputs.q_latent),
        q_rope=stored(inputs.q_rope),
        cache=stored(inputs.kv_cache),
        page_table=inputs.page_table.numpy(),
        page=sizes.page,
        heads=sizes.heads,
        scale=np.float32(inputs.scale),
    )
    team.run(
        compiled_bf16.attend,
        team.threads_for(int(multiplications(sizes) / SPEEDUP)),
        items_of(inputs.cu_q.numpy(), inputs.kv_lens.numpy(), sizes.heads),
        problem,
        compiled_bf16.Scratch(*scratch),
        stored(out),
        lse.flatten().numpy(),
    )
