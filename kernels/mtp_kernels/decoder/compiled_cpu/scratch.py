"""Memory of a pass, and its batch as compiled code takes it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.cpu.memory import LINE, floats
from mtp_kernels.cpu.paged_attention import Parts
from mtp_kernels.cpu.panel_forms import PANEL
from mtp_kernels.decoder import DecoderConfig
from mtp_kernels.decoder.compiled_cpu.attention import Batch, Scratch, plan_pass
from mtp_kernels.decoder.compiled_cpu.rows import panels_of


def planned(layout: BatchLayout, page: int, rope: Any, heads: int) -> tuple[Batch, int]:
    """Return the batch of a layout, and the largest number of parts of a wave of its attention."""
    lengths, positions = layout.kv_lens.numpy(), layout.positions.numpy()
    tiles, waves, parts, cos_sin, places = plan_pass(
        layout.cu_q.numpy(), lengths, positions, rope, heads
    )
    batch = Batch(
        cos_sin=cos_sin,
        slots=layout.slots.numpy(),
        page_table=layout.page_table.numpy(),
        page=page,
        places=places,
        tiles=tiles,
        waves=waves,
    )
    return batch, parts


def make_scratch(
    config: DecoderConfig,
    count: int,
    *,
    parts: int,
    inner: tuple[int, int],
    attention_input: torch.Tensor | None = None,
) -> Scratch:
    """Return memory for a pass over a number of rows, and parts of attention.

    inner: pairs of a row and an expert, and the inner width in whole panels. attention_input: what
    the first layer's attention is given, if anything.
    """
    attention, picked = config.attention, config.routing.experts_per_token
    return Scratch(
        *float_arrays(
            (count, panels_of(attention.projected) * PANEL),
            (count * attention.heads, attention.key),
            (count, attention.output),
            (count, config.hidden),
            (count, picked),
            (count,),
            inner,
        ),
        np.empty((count, picked), np.int64),
        Parts(*float_arrays((parts, attention.attended), (parts,), (parts,))),
        np.empty((0, 0), np.float32) if attention_input is None else attention_input.numpy(),
    )


def float_arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Return arrays side by side in one memory; each begins at a cache line, as vectors should."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(itertools.accumulate(-(-size // LINE) * LINE for size in sizes))
    memory = floats(ends[-1])
    starts = [0, *ends[:-1]]
    return [
        memory[start : start + size].reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
