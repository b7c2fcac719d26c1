"""Verification attention compiled for a CPU: float32, and bf16 where there are matrix units.

In float32 a row's bits do not depend on its batch. torch_cpu has the other dtypes, and bf16
elsewhere.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from mtp_kernels.cpu.team import process_team
from mtp_kernels.verify_attention import compiled_bf16
from mtp_kernels.verify_attention.compiled_bf16 import STEP_TOKENS
from mtp_kernels.verify_attention.compiled_parts import Keys, Parts, Queries, arrange, plan
from mtp_kernels.verify_attention.compiled_parts import attend as attend_rows
from mtp_kernels.verify_attention.inputs import Carver, Inputs, Sizes, array_bytes
from mtp_kernels.verify_attention.shares import MAX_ROWS, items_of
from mtp_kernels.verify_attention.tiles import DEPTH, TILE, has_tiles, tile_config

TILE_SPEEDUP = 16  # multiplications that a tile makes in the time of one float32


def takes_bf16(sizes: Sizes) -> bool:
    """Whether these sizes go through the matrix units: whole tiles, and a CPU that has them."""
    whole = sizes.latent % DEPTH == 0 and sizes.rope % DEPTH == 0
    return whole and sizes.dtype == sizes.kv_dtype == torch.bfloat16 and has_tiles()


def layout(sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of compiled_bf16.Scratch after `config`; no smaller for larger sizes."""
    groups = -(-min(sizes.max_q_len * sizes.heads, max(MAX_ROWS, sizes.heads)) // TILE)
    return scratch_layout(torch.get_num_threads(), groups, sizes.latent, sizes.rope)


@lru_cache
def scratch_layout(
    threads: int, groups: int, latent: int, rope: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    rows, width = groups * TILE, latent + rope
    return [
        ((threads, rows, width), torch.int16),
        ((threads, TILE, width), torch.int16),
        ((threads, STEP_TOKENS, width), torch.int16),
        ((threads, STEP_TOKENS, latent), torch.int16),
        ((threads, groups, STEP_TOKENS, TILE), torch.float32),
        ((threads, TILE, TILE), torch.int32),
        ((threads, groups, STEP_TOKENS * TILE), torch.int16),
        ((threads, 3, rows, latent), torch.float32),
        ((threads, 3, rows), torch.float32),
        ((threads, 3, rows), torch.float32),
    ]


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    """For bf16. The scratch memory of float32 goes with a call's lengths, and is its own."""
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
            "backend compiled_cpu: expected float32 queries over a float32 cache, or on a CPU with "
            f"AMX bfloat16 over bfloat16 with latent and rope multiples of {DEPTH}, found "
            f"{out.dtype} over {inputs.kv_cache.dtype} with latent {inputs.sizes.latent} and rope "
            f"{inputs.sizes.rope}; torch_cpu takes them"
        )


def multiplications(sizes: Sizes) -> int:
    return sizes.queries * sizes.heads * sizes.kv_tokens * 2 * sizes.latent


def attend_float32(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    sizes = inputs.sizes
    tiles, waves, most = plan(inputs.cu_q.numpy(), inputs.kv_lens.numpy(), sizes.heads)
    scratch = Parts(
        np.empty((most, sizes.latent), np.float32),
        np.empty(most, np.float32),
        np.empty(most, np.float32),
    )
    rows = arrange(tiles, inputs.q_latent.numpy(), inputs.q_rope.numpy())
    team = process_team()
    team.run(
        attend_rows,
        team.threads_for(multiplications(sizes)),
        tiles,
        waves,
        Queries(rows, sizes.heads, sizes.latent, np.float32(inputs.scale)),
        Keys(inputs.kv_cache.flatten(0, 1).numpy(), inputs.page_table.numpy(), sizes.page),
        scratch,
        out.numpy(),
        lse.numpy(),
    )


def attend_bf16(inputs: Inputs, buffer: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    sizes, carver, team = inputs.sizes, Carver(buffer), process_team()
    scratch = (carver.take(shape, dtype).numpy() for shape, dtype in layout(sizes))

    def stored(tensor: torch.Tensor) -> np.ndarray:
        return tensor.flatten(0, 1).view(torch.int16).numpy()

    problem = compiled_bf16.Problem(
        stored(inputs.q_latent),
        stored(inputs.q_rope),
        stored(inputs.kv_cache),
        inputs.page_table.numpy(),
        sizes.page,
        sizes.heads,
        np.float32(inputs.scale),
    )
    team.run(
        compiled_bf16.attend,
        team.threads_for(multiplications(sizes) // TILE_SPEEDUP),
        items_of(inputs.cu_q.numpy(), inputs.kv_lens.numpy(), sizes.heads),
        problem,
        compiled_bf16.Scratch(tile_config(), *scratch),
        stored(out),
        lse.flatten().numpy(),
    )
