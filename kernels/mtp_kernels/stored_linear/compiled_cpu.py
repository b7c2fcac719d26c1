"""Products with stored weights on a CPU: tiles of codes become float32 in the first-level cache,
all rows meet them there, and every thread has rows of the weight of its own.

Few rows are bound by reading the codes, many by arithmetic; no memory is written but the result.
"""

from __future__ import annotations

from typing import Any

import torch

from mtp_kernels.cpu.team import process_team
from mtp_kernels.quantize import checks
from mtp_kernels.quantize.layouts import (
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    W4AFp8,
)
from mtp_kernels.stored_linear import tiles
from mtp_kernels.stored_linear.experts import one_by_one
from mtp_kernels.stored_linear.weights import StoredWeight


def supports(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Return True for float32 rows in main memory and a weight that is narrower.

    float32 weights have nothing to expand, and torch multiplies them.
    """
    narrow = not isinstance(weight, torch.Tensor) or weight.dtype is torch.bfloat16
    return x.device.type == "cpu" and x.dtype is torch.float32 and narrow


def linear(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Return x @ weight.T, added in float32 in an order that no other row changes."""
    arrays = _arrays(weight)
    x = x.contiguous()
    y = torch.zeros(len(arrays[0]), len(x))
    team = process_team()
    threads = team.threads_for(y.numel() * x.shape[1])
    team.run(tiles.multiply, threads, x.detach().numpy(), arrays, y.numpy())
    return y.t().contiguous()


def grouped_linear(
    x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, weight: StoredWeight
) -> torch.Tensor:
    """Return x[rows[p]] @ weight[e].T for pairs p, an expert at a time."""
    return one_by_one(linear, x, rows, ends, weight)


def _arrays(weight: StoredWeight) -> Any:
    """Return codes and fp32 scales as the compiled loops read them (ValueError)."""
    match weight:
        case torch.Tensor():
            return tiles.Bf16(weight.contiguous().view(torch.uint16).numpy())
        case Fp8Block():
            codes, scale = checks.check_fp8_block(weight)
            return tiles.Fp8Blocks(codes.view(torch.uint8).numpy(), scale.numpy())
        case Fp8Channel():
            codes, scale = checks.check_fp8_channel(weight)
            return tiles.Fp8Channels(codes.view(torch.uint8).numpy(), scale.numpy())
        case Int8Channel():
            return tiles.Int8Channels(*(part.numpy() for part in checks.check_packed(weight)))
        case Int4Group() | W4AFp8():
            pairs, scale = checks.check_packed(weight)
            flip = tiles.SIGNED if isinstance(weight, W4AFp8) else tiles.OFFSET
            return tiles.Int4Groups(pairs.numpy(), scale.numpy(), flip)
