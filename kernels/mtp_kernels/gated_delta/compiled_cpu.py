"""Compiled backend: float32 on the CPU, where keys are whole vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.cpu.code import LANES
from mtp_kernels.cpu.delta_rule import READ_COST, Convolved, Pool, Spans, delta_rule
from mtp_kernels.cpu.jit import compiled
from mtp_kernels.cpu.memory import Arena, floats
from mtp_kernels.cpu.team import process_team
from mtp_kernels.gated_delta.state import DeltaState
from mtp_kernels.sizes import DeltaSizes


def supports(inputs: torch.Tensor, sizes: DeltaSizes) -> bool:
    """Return True for float32 rows in main memory and keys of whole vectors."""
    in_memory = inputs.device.type == "cpu"
    return in_memory and inputs.dtype is torch.float32 and sizes.has_whole_vectors


@compiled
def run(
    member: Any, x: Any, gates: Any, taps: Any, pool: Any, spans: Any, sizes: Any, rows: Any,
    out: Any,
) -> None:  # fmt: skip
    """Run delta_rule by a team of threads."""
    delta_rule(member, x, gates, taps, pool, spans, sizes, rows, out)


def gated_delta(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    state: DeltaState,
    layout: StateLayout,
    sizes: DeltaSizes,
) -> torch.Tensor:
    """Return the outputs [T, Hv, V] and advance the state, on the process's threads."""
    out = inputs.new_empty(len(inputs), sizes.value_heads, sizes.value)
    spans = spans_of(layout)
    rows = int(spans.starts[-1])
    team = process_team()
    products = 4 * sizes.output * sizes.key
    team.run(
        run,
        team.threads_for(products * (rows + READ_COST * len(spans.slots))),
        inputs.detach().numpy(),
        gates.detach().numpy(),
        np.ascontiguousarray(weight.detach().numpy().T),
        Pool(*(tensor.numpy() for tensor in state)),
        spans,
        sizes,
        convolved(rows, sizes),
        out.numpy(),
    )
    return out


def spans_of(layout: StateLayout) -> Spans:
    """Return a layout as compiled code takes it."""
    named = (layout.cu_rows, layout.slots, layout.replayed, layout.certain)
    cu_rows, slots, replayed, certain = (part.numpy().astype(np.int64) for part in named)
    starts = cu_rows.copy()
    starts[1:] += np.cumsum(replayed)
    return Spans(cu_rows, slots, replayed, certain, starts)


def convolved(rows: int, sizes: DeltaSizes) -> Convolved:
    """Return memory for so many rows."""
    heads = 2 * sizes.value_heads
    arena = Arena(floats(rows * (sizes.channels + heads) + 2 * LANES))
    return Convolved(arena.take(rows, sizes.channels), arena.take(rows, sizes.value_heads, 2))
