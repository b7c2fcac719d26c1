"""Kernels of weight statistics: bytes per second of each format's codes in memory, by one thread.

    python -m benchmarks.bench_weight_statistics

It writes JSON, in GB/s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from mtp_kernels import weight_statistics
from mtp_kernels.quantize import Fp8Block, Fp8Channel, Int4Group, Int8Channel, W4AFp8


def rates() -> dict[str, float]:
    """Bytes per second of each format's kernel on codes in memory, by one thread."""
    rows, columns = 2048, 7168
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8) & 0xF7
    fp8, words = codes.view(torch.float8_e4m3fn), codes.view(torch.int32)
    values = torch.randn(rows, columns)
    one, groups = torch.ones(rows, 1), torch.ones(rows, 2 * columns // 128)
    statistics = weight_statistics
    int8, int4 = Int8Channel(words, one.bfloat16()), Int4Group(words, groups.bfloat16())
    block, w4afp8 = Fp8Block(fp8, torch.ones(16, 56)), W4AFp8(codes.view(torch.int8), groups)
    small, half = values.bfloat16(), values.half()
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "bf16": (lambda: statistics.float_statistics(small), small.nbytes),
        "f16": (lambda: statistics.float_statistics(half), half.nbytes),
        "f32": (lambda: statistics.float_statistics(values), values.nbytes),
        "fp8 block": (lambda: statistics.quantized_statistics(block), codes.nbytes),
        "fp8 channel": (
            lambda: statistics.quantized_statistics(Fp8Channel(fp8, one)),
            codes.nbytes,
        ),
        "int8 channel": (lambda: statistics.quantized_statistics(int8), codes.nbytes),
        "int4 group": (lambda: statistics.quantized_statistics(int4), codes.nbytes),
        "w4afp8": (lambda: statistics.quantized_statistics(w4afp8), codes.nbytes),
    }
    return {name: round(size / _best(run) / 1e9, 2) for name, (run, size) in cases.items()}


def _best(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, compiled before."""
    run()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(rates()))
