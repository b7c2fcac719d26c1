"""verify_attention on a device: time, share of a copy, batch expansion, and its peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.attention_shapes import (
    LATENT,
    WIDTH,
    Shape,
    cache_count,
    calls_of,
    expanded,
    kv_lens_of,
    pools_of,
)
from benchmarks.gpu_report.device import Device
from benchmarks.gpu_report.peers import PEERS
from benchmarks.gpu_report.stages import Row

BACKEND = "triton_cuda"


def attention_rows(
    device: Device,
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    copy_bytes_per_second: float | None,
    peers: Sequence[str],
) -> Iterator[Row]:
    """Yield a row per shape; those whose caches do not fit are left out by name."""
    for shape in shapes:
        needed_bytes = cache_count(shape) * cache_bytes(shape) * 2  # FlashInfer's copy beside it
        if needed_bytes > device.free_bytes:
            yield asdict(shape) | {"error": f"{needed_bytes} bytes needed"}
            continue
        yield _row(device, shape, dtype, copy_bytes_per_second, peers)
        device.forget()


def cache_bytes(shape: Shape) -> int:
    """Return the bytes of one batch's cache in 16 bits."""
    return int(kv_lens_of(shape).sum()) * WIDTH * 2


def _row(
    device: Device,
    shape: Shape,
    dtype: torch.dtype,
    copy_bytes_per_second: float | None,
    peers: Sequence[str],
) -> Row:
    pools = pools_of(shape, device.device, dtype, cache_count(shape))
    fused = device.seconds(calls_of(pools, shape.queries, BACKEND))
    tokens = int(kv_lens_of(shape).sum())
    operations = 2 * shape.queries * shape.heads * (WIDTH + LATENT) * tokens
    rate = cache_bytes(shape) / fused
    row: Row = asdict(shape) | {
        "fused_us": fused * 1e6,
        "kv_gb_per_second": rate / 1e9,
        "tflops": operations / fused / 1e12,
    }
    if copy_bytes_per_second is not None:
        floor = cache_bytes(shape) / copy_bytes_per_second
        row |= {"share_of_copy": rate / copy_bytes_per_second, "floor_us": floor * 1e6}
    return row | _expanded(device, shape, pools) | _peers(device, shape, pools, peers)


def _expanded(device: Device, shape: Shape, pools: list[dict[str, Any]]) -> Row:
    """Return the times of batch expansion, a group's rows adjacent and far apart."""
    if shape.queries == 1:
        return {}
    found = {}
    for name, adjacent in (("adjacent", True), ("apart", False)):
        calls = calls_of([expanded(pool, shape, adjacent) for pool in pools], 1, BACKEND)
        found[f"expanded_{name}_us"] = device.seconds(calls) * 1e6
    return found


def _peers(device: Device, shape: Shape, pools: list[dict[str, Any]], peers: Sequence[str]) -> Row:
    found: Row = {}
    for name in () if shape.ragged else peers:
        try:
            calls = [PEERS[name](pool, shape) for pool in pools]
            found[f"{name}_us"] = device.seconds(calls) * 1e6
        except Exception as error:  # another library's limits, versions and memory
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
    return found
