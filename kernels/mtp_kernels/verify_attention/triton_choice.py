"""Launch parameters of the Triton backend for a GPU: those tuned on it, those listed for it, or
those of the nearest listed one that compile for it and fit into its shared memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from triton.errors import TritonError

from mtp_kernels.gpu import tuned
from mtp_kernels.gpu.devices import Gpu
from mtp_kernels.verify_attention.inputs import Sizes
from mtp_kernels.verify_attention.triton_compile import compile_attend
from mtp_kernels.verify_attention.triton_tuning import (
    KINDS,
    Launch,
    listed,
    nearest_first,
    product_kind,
)

logger = logging.getLogger(__name__)
KERNEL = "verify_attention"  # its name in the files of tuned tables


def launch_for(gpu: Gpu, dtype: torch.dtype, kv_dtype: torch.dtype, rows: int) -> Launch:
    """Return the smallest tile for `rows`, or the largest; ValueError where none runs."""
    tiles = tiles_for(gpu, product_kind(dtype, kv_dtype))
    return next((launch for launch in tiles if launch.rows >= rows), tiles[-1])


@cache
def tiles_for(gpu: Gpu, kind: str) -> tuple[Launch, ...]:
    """Return the tiles of a kind of product, by ascending rows."""
    if tuned := _tuned(gpu).get(kind):
        return tuned
    known = listed(gpu.capability, gpu.triton)
    if known is None:
        return _nearest(gpu, kind)
    if kind not in known:
        raise ValueError(
            f"backend triton_cuda: expected {' or '.join(known)} on {gpu}, found {kind}"
        )
    return known[kind]


def _tuned(gpu: Gpu) -> dict[str, tuple[Launch, ...]]:
    tables = tuned.read(gpu, KERNEL)
    try:
        return {kind: tuple(Launch(**row) for row in rows) for kind, rows in tables.items()}
    except TypeError as error:
        raise tuned.damaged(tuned.path_of(gpu), str(error)) from error


def _nearest(gpu: Gpu, kind: str) -> tuple[Launch, ...]:
    """Return the tiles of the nearest table of which any runs, and say so."""
    for name, tables in nearest_first(gpu.capability, gpu.triton):
        tiles = fitting(gpu, kind, tables.get(kind, ()))
        if tiles:
            logger.warning(
                "%s is in no table: %s products of verify_attention take the launch parameters of "
                "%s; python -m benchmarks.gpu_report tunes them",
                gpu, kind, name,
            )  # fmt: skip
            return tiles
    raise ValueError(
        f"backend triton_cuda: expected a GPU for which a listed launch of {kind} products "
        f"compiles and fits into {gpu.shared_bytes} bytes of shared memory, found {gpu}"
    )


def fitting(gpu: Gpu, kind: str, tiles: Sequence[Launch]) -> tuple[Launch, ...]:
    """Return the tiles that compile and fit, with as many programs side by side as fit."""
    found = []
    for launch in tiles:
        try:
            shared_bytes = compile_attend(gpu.target, usual_sizes(kind), launch).metadata.shared
        except (TritonError, RuntimeError) as error:  # a pass of the compiler that fails
            logger.info("%s does not compile for %s: %s", launch, gpu, error)
            continue
        if shared_bytes <= gpu.shared_bytes:
            beside = max(1, gpu.shared_bytes // max(1, shared_bytes))
            found.append(replace(launch, programs_per_sm=min(launch.programs_per_sm, beside)))
    return tuple(found)


def usual_sizes(kind: str, heads: int = 16) -> Sizes:
    """Return sizes of a call to DeepSeek-V3's layers, the largest of the models here."""
    dtype, kv_dtype = KINDS[kind]
    return Sizes(
        batch=8,
        queries=32,
        max_q_len=4,
        kv_tokens=8192,
        heads=heads,
        latent=512,
        rope=64,
        page=64,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
