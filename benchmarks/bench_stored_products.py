"""Products with weights as they are stored: bytes per second beside torch's sum of integers,
and beside torch's own products, each on all cores.

    python -m benchmarks.bench_stored_products OUTPUT.json

Matrices are too large for the caches. All cases are run in turn, several times, and the best of
each counts: neighbours on the machine disturb single runs. Activations are float32, and bf16 or
int8 where these make a difference; those of torch's products are bf16. Where kt-kernel is
installed, its experts of int4 are multiplied as well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.kt_peer import expert_products
from benchmarks.common.measure import machine
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.decoder import ACTIVATIONS, Piece
from mtp_kernels.decoder.compiled_cpu.packing import Packer
from mtp_kernels.decoder.compiled_cpu.passes import Projection
from mtp_kernels.quantize.row_codes import RowCodes

OUTPUTS, INPUTS, GROUP = 196_608, 2048, 128
ROWS = (1, 2, 3, 4, 8, 16, 32)
TURNS = 9
IDLE = 0.3  # seconds after which torch's threads no longer spin beside ours


class Stored:
    """A matrix whose rows are in memory as they are stored."""

    def __init__(self, rows: Piece) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        return OUTPUTS, INPUTS

    def pieces(self) -> Iterator[Piece]:
        """Yield all rows."""
        return iter([self._rows])


def weights() -> dict[str, Piece]:
    """Return a matrix in every form."""
    codes = torch.randint(0, 255, (OUTPUTS, INPUTS), dtype=torch.uint8)
    one, groups, of_32, of_16 = (
        torch.rand(OUTPUTS, INPUTS // group) for group in (INPUTS, GROUP, 32, 16)
    )
    fp8, e2m1 = (codes & 0xF7).view(torch.float8_e4m3fn), codes[:, : INPUTS // 2].contiguous()
    pairs = e2m1.view(torch.int32)
    return {
        "bf16": torch.randn(OUTPUTS // 2, INPUTS).bfloat16().repeat(2, 1),
        "fp8_block": RowCodes(fp8, groups, GROUP),
        "fp8_channel": RowCodes(fp8, one, INPUTS),
        "int8_channel": RowCodes(codes.view(torch.int8), one, INPUTS),
        "int4_group": RowCodes(pairs, groups, GROUP),
        "q8_0": RowCodes(codes.view(torch.int8), of_32, 32),
        "q4_0": RowCodes(pairs, of_32, 32),
        "mxfp8": RowCodes(fp8, of_32, 32),
        "mxfp4": RowCodes(e2m1, of_32, 32),
        "nvfp4": RowCodes(e2m1, of_16, 16),
    }


def torch_products() -> dict[str, tuple[int, Callable[[torch.Tensor], object]]]:
    """Return the bytes and the product of torch's own weights, by name."""
    codes = torch.randint(0, 16, (OUTPUTS, INPUTS), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.rand(INPUTS // GROUP, OUTPUTS, 2).bfloat16()
    dense = torch.randn(OUTPUTS // 4, INPUTS).bfloat16().repeat(4, 1)
    int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
    return {
        "torch bf16": (dense.nbytes, lambda x: torch.mm(x, dense.t())),
        "torch int4pack": (codes.numel() // 2, lambda x: int4(x, packed, GROUP, scales)),
    }


def cases() -> Iterator[tuple[str, int, int, int, Callable[[], object]]]:
    """Yield the name, rows, bytes of the weight, operations and call of every product."""
    each = 2 * OUTPUTS * INPUTS
    for name, weight in weights().items():
        forms = set()
        for activations in ACTIVATIONS:
            packer = Packer(Arena(), torch.float32, activations)
            projection = Projection.packed(Stored(weight), packer)
            assert isinstance(projection.memory, np.ndarray)
            form = projection.first_panel.form
            if form in forms:  # these weights take such activations in float32
                continue
            forms.add(form)
            kind = str(activations).removeprefix("torch.")
            label = name if activations is torch.float32 else f"{name}, {kind} activations"
            for rows in ROWS:
                x = torch.randn(rows, INPUTS)
                yield label, rows, projection.memory.nbytes, each * rows, partial(projection, x)
    for name, (size, product) in torch_products().items():
        for rows in ROWS:
            x = torch.randn(rows, INPUTS).bfloat16()
            yield name, rows, size, each * rows, partial(product, x)
    for case in expert_products(ROWS):
        yield "kt-kernel int4", *case


def main(output: Path) -> None:
    """Measure, and write a result file."""
    numbers = torch.ones(1 << 27, dtype=torch.int64)
    found = list(cases())
    best, best_read = [float("inf")] * len(found), float("inf")
    for _ in range(TURNS):
        for number, (*_, call) in enumerate(found):
            if number % len(ROWS) == 0:
                best_read = min(best_read, seconds(numbers.sum))
                time.sleep(IDLE)
            best[number] = min(best[number], seconds(call))
    bandwidth = numbers.nbytes / best_read
    rows = [
        {
            "product": name,
            "rows": count,
            "gb_per_second": round(size / taken / 1e9, 2),
            "times_torch_sum": round(size / taken / bandwidth, 2),
            "gflop_per_second": round(operations / taken / 1e9, 1),
        }
        for (name, count, size, operations, _), taken in zip(found, best, strict=True)
    ]
    facts = {"machine": machine(), "threads": torch.get_num_threads(), "turns": TURNS}
    facts |= {"read_gb_per_second": round(bandwidth / 1e9, 2), "products": rows}
    output.write_text(json.dumps(facts, indent=1) + "\n")
    for row in rows:
        print(*row.values())


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
