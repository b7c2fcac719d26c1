"""The quantization kernels on a device: weights and bytes per second of each conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.common.quantize_operations import operations
from benchmarks.gpu_report.device import Device
from benchmarks.gpu_report.stages import Row


def conversion_rows(
    device: Device, shapes: Sequence[tuple[int, int]], copy_bytes_per_second: float | None
) -> Iterator[Row]:
    """Yield a row per matrix and conversion; their checks wait for the device, and count."""
    for shape in shapes:
        weights = torch.randn(shape, device=device.device) * 0.02
        for name, (bytes_each, run) in operations(weights).items():
            seconds = device.seconds([run], captured=False)
            rate = weights.numel() * bytes_each / seconds
            row: Row = {
                "conversion": name,
                "shape": list(shape),
                "gelem_per_second": weights.numel() / seconds / 1e9,
                "gb_per_second": rate / 1e9,
            }
            if copy_bytes_per_second is not None:
                row["share_of_copy"] = rate / copy_bytes_per_second
            yield row
