"""Verification attention in float32 on a CPU, compiled: bits that do not depend on the batch.

It computes float32 queries over a float32 cache; torch_cpu has the other dtypes.
"""

from __future__ import annotations

import numpy as np
import torch

from mtp_kernels.team import process_team
from mtp_kernels.verify_attention.compiled_parts import Keys, Parts, Queries, plan
from mtp_kernels.verify_attention.compiled_parts import attend as attend_rows
from mtp_kernels.verify_attention.inputs import Inputs, Sizes


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    """Its scratch memory goes with the lengths of a call, and is not the caller's."""
    return 0


def attend(
    inputs: Inputs, buffer: torch.Tensor, parts: int | None, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Write out [T, h, c] and lse [T, h]."""
    sizes = inputs.sizes
    if inputs.kv_cache.dtype != torch.float32 or out.dtype != torch.float32:
        raise ValueError(
            "backend compiled_cpu: expected float32 queries over a float32 cache, found "
            f"{out.dtype} over {inputs.kv_cache.dtype}; torch_cpu takes them"
        )
    tiles, waves, most = plan(inputs.cu_q.numpy(), inputs.kv_lens.numpy(), sizes.heads)
    scratch = Parts(
        np.empty((most, sizes.latent), np.float32),
        np.empty(most, np.float32),
        np.empty(most, np.float32),
    )
    rows = torch.cat([inputs.q_latent, inputs.q_rope], dim=-1).numpy()
    team = process_team()
    team.run(
        attend_rows,
        team.threads_for(sizes.queries * sizes.heads * sizes.kv_tokens * 2 * sizes.latent),
        tiles,
        waves,
        Queries(rows, sizes.latent, np.float32(inputs.scale)),
        Keys(inputs.kv_cache.flatten(0, 1).numpy(), inputs.page_table.numpy(), sizes.page),
        scratch,
        out.numpy(),
        lse.numpy(),
    )
