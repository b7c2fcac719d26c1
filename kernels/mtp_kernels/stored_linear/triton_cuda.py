"""Products with stored weights on GPUs in Triton: the weights stay as they are stored, and few rows
are bound by reading them once.

Neither codes nor scales are checked, since that would wait for the device: those that are no
numbers give NaN. Nothing is read back, so that calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from mtp_kernels.gpu.devices import gpu_of, launches_on
from mtp_kernels.quantize.layouts import (
    BLOCK,
    Fp8Block,
    Fp8Channel,
    Int4Group,
    Int8Channel,
    W4AFp8,
)
from mtp_kernels.stored_linear.triton_kernels import add_shares_kernel, product_kernel
from mtp_kernels.stored_linear.weights import StoredWeight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONVERTS_E4M3 = 89  # compute capability from which on devices do it themselves
# Numbers that turn a nibble into its code plus 8.
OFFSET, SIGNED = 0, 8
PICKS = 8  # experts that even a single row picks, in DeepSeek-V3
MOST_SHARES, FEWEST_STEPS = 8, 4  # of the columns, and of a share of them
ADDED = 1024  # elements whose shares a program adds


@dataclass(frozen=True)
class Launch:
    """Launch parameters of tiles of `rows` rows of x and `columns` outputs."""

    rows: int
    columns: int
    warps: int
    stages: int  # steps in flight
    step: int = BLOCK  # most columns of the weight that are multiplied at a time
    # Programs that a processor should have: where tiles are fewer, the columns are shared out. One
    # program has too few bytes in flight for its processor's part of the memory's bandwidth. Not in
    # float32, whose bits then do not depend on the tile.
    programs_per_processor: int = 0


# By what is multiplied, ascending rows: what compiles without spills on 8.0, 9.0 and 10.0 and fits
# the 99 KB that GPUs of 8.6, 8.9 and 12.0 have too. No device has measured them yet.
LAUNCHES = {
    "16 bit": (Launch(16, 64, 4, 4, BLOCK, 4), Launch(32, 64, 4, 3), Launch(64, 64, 4, 3)),
    "fp32": (Launch(16, 32, 4, 2, 32), Launch(32, 32, 8, 2, 32)),
}


@dataclass(frozen=True)
class Codes:
    """Stored codes and scales as the kernel takes them; leading dimension of experts, or none."""

    codes: torch.Tensor
    scale: torch.Tensor | None
    outputs: int
    form: str
    flip: int
    scale_rows: int
    scale_columns: int


def supports(x: torch.Tensor, weight: StoredWeight) -> bool:
    """Return True for rows on a GPU, or under Triton's interpreter, and a weight that is quantized
    or of experts.

    Others are what torch multiplies, and rows of which gradients are wanted. The interpreter
    multiplies no bfloat16.
    """
    single = isinstance(weight, torch.Tensor) and weight.ndim == 2
    if single or x.dtype not in DTYPES or x.requires_grad:
        return False
    if triton.knobs.runtime.interpret:
        return x.device.type == "cpu" and x.dtype is not torch.bfloat16
    return x.device.type == "cuda"


def linear(x: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """Return x @ weight.T, added in float32."""
    return _product(x, None, None, codes_of(weight, gpu_of(x.device).target), len(x))


def grouped_linear(
    x: torch.Tensor, rows: torch.Tensor | None, ends: torch.Tensor, weight: StoredWeight
) -> torch.Tensor:
    """Return x[rows[p]] @ weight[e].T for every pair p, by the expert e whose pairs it is among."""
    count = len(x) if rows is None else len(rows)
    return _product(x, rows, ends, codes_of(weight, gpu_of(x.device).target), count)


def _product(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    ends: torch.Tensor | None,
    stored: Codes,
    count: int,
) -> torch.Tensor:
    y = x.new_empty(count, stored.outputs)
    if not y.numel():
        return y
    experts = 0 if ends is None else len(ends)
    launch = launch_for(x.dtype, -(-count // max(1, experts)))
    constants = constants_of(stored, launch, experts)
    steps = steps_of(stored, launch, x.shape[1], experts, gpu_of(x.device).processors)
    shares = triton.cdiv(x.shape[1], steps * constants["STEP"])
    sums = y if shares == 1 else y.new_empty(shares, *y.shape, dtype=torch.float32)
    # Every expert's last tile may be a part of one.
    tiles = triton.cdiv(count, launch.rows) + min(experts, count)
    grid = tiles, triton.cdiv(stored.outputs, launch.columns), shares
    with launches_on(x.device):
        product_kernel[grid](
            x.contiguous(), rows, ends, stored.codes, stored.scale, sums, count, stored.outputs,
            x.shape[1], stored.codes.shape[-1], steps, **constants, num_warps=launch.warps,
        )  # fmt: skip
        if shares > 1:
            blocks = (triton.cdiv(y.numel(), ADDED),)
            add_shares_kernel[blocks](sums, y, y.numel(), SHARES=shares, BLOCK=ADDED)
    return y


def steps_of(stored: Codes, launch: Launch, columns: int, experts: int, processors: int) -> int:
    """Return the steps of a program along a weight's columns: they follow from the weight and the
    tile alone, so that a row's bits depend on no other row."""
    steps = -(-columns // step_of(stored, launch))
    programs = -(-stored.outputs // launch.columns) * min(PICKS, max(1, experts))
    wanted = launch.programs_per_processor * processors // programs
    shares = max(1, min(wanted, MOST_SHARES, steps // FEWEST_STEPS))
    return -(-steps // shares)


def step_of(stored: Codes, launch: Launch) -> int:
    """Return how many columns are multiplied at a time: those under one scale at most."""
    return min(launch.step, stored.scale_columns or BLOCK)


def constants_of(stored: Codes, launch: Launch, experts: int) -> dict[str, Any]:
    """Return the compile-time arguments of `product_kernel`."""
    return {
        "EXPERTS": experts,
        "EXPERTS_POW2": triton.next_power_of_2(max(1, experts)),
        "FORM": stored.form,
        "FLIP": stored.flip,
        "SCALE_ROWS": stored.scale_rows,
        "SCALE_COLUMNS": stored.scale_columns,
        "ROWS": launch.rows,
        "COLUMNS": launch.columns,
        "STEP": step_of(stored, launch),
        "STAGES": launch.stages,
    }


def launch_for(dtype: torch.dtype, rows: int) -> Launch:
    """Return the smallest tile for `rows` rows of a weight, or the largest."""
    tiles = LAUNCHES["fp32" if dtype == torch.float32 else "16 bit"]
    return next((launch for launch in tiles if launch.rows >= rows), tiles[-1])


def codes_of(weight: StoredWeight, target: GPUTarget) -> Codes:
    """Return a weight [N, K], or one of experts [E, N, K], as the kernel takes it on a target."""
    match weight:
        case torch.Tensor():
            return Codes(weight.contiguous(), None, weight.shape[-2], "dense", 0, 1, 0)
        case Fp8Block():
            codes, scale = _fp8(weight.codes, target), weight.scale.float().contiguous()
            return Codes(codes, scale, codes.shape[-2], "fp8", 0, BLOCK, BLOCK)
        case Fp8Channel():
            codes, scale = _fp8(weight.codes, target), weight.scale.contiguous()
            return Codes(codes, scale, codes.shape[-2], "fp8", 0, 1, 0)
        case Int8Channel():
            codes = weight.packed.contiguous().view(torch.uint8)
            return Codes(codes, weight.scale.contiguous(), codes.shape[-2], "int8", 0, 1, 0)
        case Int4Group():
            return _int4(weight.packed, weight.scale, OFFSET)
        case W4AFp8():
            return _int4(weight.packed, weight.scale, SIGNED)


def _fp8(codes: torch.Tensor, target: GPUTarget) -> torch.Tensor:
    """Return e4m3 codes, as bytes where the device cannot convert them."""
    converts = isinstance(target.arch, int) and target.arch >= CONVERTS_E4M3
    codes = codes.contiguous()
    return codes if converts else codes.view(torch.uint8)


def _int4(packed: torch.Tensor, scale: torch.Tensor, flip: int) -> Codes:
    codes = packed.contiguous().view(torch.uint8)
    group = 2 * codes.shape[-1] // scale.shape[-1]
    return Codes(codes, scale.contiguous(), codes.shape[-2], "int4", flip, 1, group)
