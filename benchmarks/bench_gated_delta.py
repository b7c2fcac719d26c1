"""Gated delta nets on a CPU: time of a pass beside that of reading and writing its states in place.

    python -m benchmarks.bench_gated_delta [--rounds N] [--threads N]

It writes JSON: for the layers of a model, requests and rows of each, milliseconds of a pass through
all layers, of multiplying every number of their states by a constant, and the ratio. Each is the
best of several rounds in turn: of processor time with one thread, which others beside it take no
part of, and of wall-clock time with several.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from benchmarks.common.measure import machine
from mtp_kernels.batch_layout import StateLayout
from mtp_kernels.gated_delta import DeltaState, gated_delta
from mtp_kernels.sizes import DeltaSizes

# Sizes and number of the layers: of Qwen3.5-0.8B and Qwen3.5-35B-A3B.
MODELS = {
    "0.8B": (DeltaSizes(key_heads=16, value_heads=16, key=128, value=128, width=4), 18),
    "35B-A3B": (DeltaSizes(key_heads=16, value_heads=32, key=128, value=128, width=4), 30),
}
CASES = ((1, 1), (1, 4), (1, 16), (16, 1), (16, 4))  # requests, rows of each
MAX_DRAFTS = 5


class Pass:
    """A pass of some requests through the layers of a model."""

    def __init__(self, sizes: DeltaSizes, layers: int, requests: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        total = requests * rows
        self._inputs = torch.randn(total, sizes.channels, generator=generator)
        self._gates = torch.rand(total, 2, sizes.value_heads, generator=generator)
        self._gates[:, 0] *= -1.0
        self._weight, self._sizes = torch.randn(sizes.channels, sizes.width), sizes
        self._states = [
            DeltaState.empty(requests, MAX_DRAFTS, sizes, torch.float32, "cpu")
            for _ in range(layers)
        ]
        counts = torch.full((requests,), rows, dtype=torch.int32)
        slots = torch.arange(requests, dtype=torch.int32)
        starts = torch.arange(0, total + 1, rows, dtype=torch.int32)
        self._layout = StateLayout(starts, slots, torch.zeros_like(counts), counts)

    def run(self) -> None:
        """Take all layers' states through the rows."""
        for state in self._states:
            gated_delta(
                self._inputs, self._gates, self._weight, state, self._layout, self._sizes,
                backend="compiled_cpu",
            )  # fmt: skip

    def touch(self) -> None:
        """Read and write all layers' states."""
        for state in self._states:
            state.states.mul_(0.999)


def measured(case: Pass, rounds: int) -> dict[str, float]:
    """Return milliseconds of both, and their ratio."""
    case.run()
    found = [(_milliseconds(case.run), _milliseconds(case.touch)) for _ in range(rounds)]
    run, touch = (min(times) for times in zip(*found, strict=True))
    return {"pass ms": round(run, 3), "states ms": round(touch, 3), "ratio": round(run / touch, 2)}


def _milliseconds(run: Callable[[], None]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return (clock() - start) * 1e3


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {
        f"{name}, {requests} x {rows} rows": measured(Pass(*model, requests, rows), options.rounds)
        for name, model in MODELS.items()
        for requests, rows in CASES
    }
    print(
        json.dumps({"machine": machine(), "threads": options.threads, "results": results}, indent=2)
    )


if __name__ == "__main__":
    main()
