"""What the device reaches without our kernels: bytes of a copy and operations of a product."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_report.device import Device
from benchmarks.gpu_report.stages import Row


def limit_rows(device: Device, copied_bytes: int, side: int, dtype: torch.dtype) -> Iterator[Row]:
    """Yield a copy's bytes per second, read and written, and a square product's operations."""
    yield {"limit": "copy", "bytes_per_second": 2 * copied_bytes / _copy(device, copied_bytes)}
    seconds = _product(device, side, dtype)
    yield {
        "limit": "product",
        "dtype": str(dtype).removeprefix("torch."),
        "side": side,
        "operations_per_second": 2 * side**3 / seconds,
    }


def _copy(device: Device, size_bytes: int) -> float:
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device.device)
    target = torch.empty_like(source)
    return device.seconds([lambda: target.copy_(source)])


def _product(device: Device, side: int, dtype: torch.dtype) -> float:
    """Random numbers: a product of zeros draws less power, and is faster."""
    left, right = (torch.randn(side, side, dtype=dtype, device=device.device) for _ in range(2))
    product = torch.empty_like(left)
    return device.seconds([lambda: torch.mm(left, right, out=product)])


def copy_rate(rows: list[Row]) -> float | None:
    """Return the measured copy's bytes per second."""
    return next((row["bytes_per_second"] for row in rows if row["limit"] == "copy"), None)
