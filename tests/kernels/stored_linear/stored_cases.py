"""Weights in every stored form, and products with them in Triton's interpreter.

Run as a script under TRITON_INTERPRET=1, which must be set before triton is imported: it prints the
cases on which the Triton kernels differ from the reference.

    python stored_cases.py device|bits few|all
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate

import torch

from mtp_kernels import quantize
from mtp_kernels.stored_linear import StoredWeight, dequantize, grouped_linear, linear, stack


def values(rows: int, columns: int, seed: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows if seed is None else seed)
    return torch.randn(rows, columns, generator=generator)


def fp8_channel(weights: torch.Tensor) -> quantize.Fp8Channel:
    scale = weights.abs().amax(dim=1, keepdim=True) / 448
    return quantize.Fp8Channel((weights / scale).to(torch.float8_e4m3fn), scale.bfloat16())


def every_code(weights: torch.Tensor) -> quantize.Fp8Block:
    """All 254 finite codes in turn, subnormals too, under the scales of the weights."""
    block, _ = quantize.quantize_fp8_block(weights)
    codes = (torch.arange(weights.numel()) % 256).to(torch.uint8).view(weights.shape)
    codes[(codes & 0x7F) == 0x7F] = 0
    return quantize.Fp8Block(codes.view(torch.float8_e4m3fn), block.scale)


def e8m0(weights: torch.Tensor) -> quantize.Fp8Block:
    block, _ = quantize.quantize_fp8_block(weights, power_of_two_scale=True)
    return quantize.Fp8Block(block.codes, block.scale.to(torch.float8_e8m0fnu))


def bf16_scales(weights: torch.Tensor) -> quantize.Fp8Block:
    block, _ = quantize.quantize_fp8_block(weights)
    return quantize.Fp8Block(block.codes, block.scale.bfloat16())


FORMS: dict[str, Callable[[torch.Tensor], StoredWeight]] = {
    "fp8 blocks": lambda weights: quantize.quantize_fp8_block(weights)[0],
    "fp8 blocks, every code": every_code,
    "fp8 blocks, e8m0": e8m0,
    "fp8 blocks, bf16": bf16_scales,
    "fp8 channels": fp8_channel,
    "int8": lambda weights: quantize.quantize_int8_channel(weights)[0],
    "int4 in 32": lambda weights: quantize.quantize_int4_group(weights, group_size=32)[0],
    "int4 in 128": lambda weights: quantize.quantize_int4_group(weights)[0],
    "w4afp8": lambda weights: quantize.quantize_w4afp8(weights)[0],
}
# Dense weights, which the kernels multiply for several experts alone.
DENSE: dict[str, Callable[[torch.Tensor], StoredWeight]] = {
    "bf16": torch.Tensor.bfloat16,
    "float32": torch.Tensor.float,
}
# Rows of a weight that end within tiles and blocks; and columns, where the format allows it.
SHAPES = [(77, 384), (200, 128)]
RAGGED = [("fp8 blocks", (9, 531)), ("fp8 channels", (130, 131)), ("int8", (33, 132))]
CASES = [(form, shape) for form in FORMS for shape in SHAPES] + RAGGED
FEW_CASES = [(form, (40, 128)) for form in FORMS] + [("fp8 channels", (9, 131))]
# Columns that several programs share.
SHARED = [("fp8 blocks", (9, 1300)), ("int4 in 32", (40, 1024))]
CASES, FEW_CASES = CASES + SHARED, FEW_CASES + SHARED
Cases = list[tuple[str, tuple[int, int]]]
COUNTS = (0, 5, 0, 18)  # pairs of each expert
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def differs(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True where a product is further from a float64 one than its dtype explains."""
    if found.shape != exact.shape or found.dtype != dtype:
        return True
    error = (found.double().cpu() - exact.cpu()).norm()
    return not bool(error <= TOLERANCE[dtype] * exact.norm().cpu())


def plain_cases(cases: Cases, dtype: torch.dtype, device: str, backend: str) -> list[str]:
    """The forms, shapes and counts of rows whose products differ from the dense matrix's."""
    wrong = []
    for form, shape in cases:
        weight = moved(FORMS[form](values(*shape)), device)
        dense = dequantize(weight, torch.float32).double()
        for rows in (0, 1, 20):
            x = values(rows, shape[1], seed=rows).to(device, dtype)
            found = linear(x, weight, backend=backend)
            if differs(found, x.double() @ dense.t(), dtype):
                wrong.append(f"{form} {shape} {rows} rows {dtype}")
    return wrong


def grouped_cases(cases: Cases, dtype: torch.dtype, device: str, backend: str) -> list[str]:
    """The forms whose products, grouped by expert, differ from one expert's after the other."""
    wrong = []
    ends = torch.tensor(list(accumulate(COUNTS)), dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(0)
    for form, shape in [*cases, *((form, (77, 136)) for form in DENSE)]:
        make = (FORMS | DENSE)[form]
        experts = [
            moved(make(values(*shape, seed=number)), device) for number in range(len(COUNTS))
        ]
        dense = [dequantize(one, torch.float32).double() for one in experts]
        weight = stack(experts)
        x = values(11, shape[1], seed=1).to(device, dtype)
        picked = torch.randint(11, (sum(COUNTS),), generator=generator).to(device)
        for rows, source in ((picked, x), (None, x[picked])):
            found = grouped_linear(source, rows, ends, weight, backend=backend)
            parts = x[picked].double().split(COUNTS)
            exact = torch.cat([part @ one.t() for part, one in zip(parts, dense, strict=True)])
            if differs(found, exact, dtype):
                wrong.append(f"{form} {shape} grouped, rows {rows is not None} {dtype}")
    return wrong


def damaged_cases(device: str) -> list[str]:
    """NaN codes give NaN in their row's outputs alone."""
    block = FORMS["fp8 blocks"](values(40, 256))
    assert isinstance(block, quantize.Fp8Block)
    block.codes.view(torch.uint8)[7, 3] = 0x7F
    x = values(3, 256).to(device)
    from mtp_kernels.stored_linear import triton_cuda

    found = triton_cuda.linear(x, moved(block, device)).isnan()
    return [] if found[:, 7].all() and int(found.sum()) == 3 else ["NaN codes"]


def moved(weight: StoredWeight, device: str) -> StoredWeight:
    if isinstance(weight, torch.Tensor):
        return weight.to(device)
    parts = {name: tensor.to(device) for name, tensor in vars(weight).items()}
    return type(weight)(**parts)


def wrong_cases(cases: Cases, dtypes: list[torch.dtype], device: str, backend: str) -> list[str]:
    return [
        case
        for dtype in dtypes
        for differing in (plain_cases, grouped_cases)
        for case in differing(cases, dtype, device, backend)
    ]


if __name__ == "__main__":
    from mtp_kernels.gpu import devices
    from mtp_kernels.stored_linear import triton_cuda

    wrong = []
    if sys.argv[1] == "bits":  # as devices that do not convert e4m3; the interpreter makes NaN 480
        triton_cuda.CONVERTS_E4M3 = devices.INTERPRETED.target.arch + 1
        wrong += damaged_cases("cpu")
    few = sys.argv[2] == "few"
    chosen, dtypes = (FEW_CASES if few else CASES), [torch.float16, torch.float32]
    wrong += wrong_cases(chosen, dtypes[: 1 if few else 2], "cpu", "triton_cuda")
    sys.exit("\n".join(wrong) or 0)
