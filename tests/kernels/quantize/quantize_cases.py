"""The sources and operations that every backend must agree on, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mtp_kernels import quantize
from mtp_kernels.quantize import ErrorStats, Fp8Block

Source = torch.Tensor | Fp8Block
Result = tuple[list[torch.Tensor], ErrorStats]


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.02


def fp8_source(rows: int, columns: int, scale_factor: float = 1e-3, seed: int = 0) -> Fp8Block:
    """Random finite codes, all 254 of them in turn where they fit, under random scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)[: codes.numel()]
    codes[(codes & 0x7F) == 0x7F] = 0
    shape = (-(-rows // 128), -(-columns // 128))
    scale = (torch.rand(shape, generator=generator) + 0.1) * scale_factor
    return Fp8Block(codes.view(torch.float8_e4m3fn), scale)


def awkward(rows: int, columns: int) -> torch.Tensor:
    """Zero and constant groups, negative zeros, subnormals, wide ranges, ties."""
    weights = gaussian(rows, columns, seed=1)
    weights[0] = 0.0
    weights[1 % rows] = -0.0
    weights[2 % rows] = 0.3
    weights[3 % rows] *= 1e-37
    weights[4 % rows] *= 1e-43
    weights[5 % rows] *= 1e35
    weights[:, : columns // 3] *= 1e-20
    weights[-1] = torch.arange(columns) % 16 - 7.5
    return weights


def sources(rows: int, columns: int) -> dict[str, Source]:
    fp8 = fp8_source(rows, columns)
    powers = torch.exp2(torch.round(torch.log2(fp8.scale)))
    return {
        "fp32": gaussian(rows, columns),
        "bf16": gaussian(rows, columns).to(torch.bfloat16),
        "awkward": awkward(rows, columns),
        "awkward bf16": awkward(rows, columns).to(torch.bfloat16),
        "fp8": fp8,
        "fp8 subnormal products": fp8_source(rows, columns, 1e-39),
        "fp8 under e8m0": Fp8Block(fp8.codes, powers.to(torch.float8_e8m0fnu)),
        "fp8 under bf16": Fp8Block(fp8.codes, fp8.scale.bfloat16()),
    }


def _fp8(source: Source, power_of_two: bool, backend: str) -> Result:
    assert isinstance(source, torch.Tensor)
    block, stats = quantize.quantize_fp8_block(
        source, power_of_two_scale=power_of_two, backend=backend
    )
    return [block.codes, block.scale], stats


def _from_fp8(source: Source, dtype: torch.dtype, backend: str) -> Result:
    assert isinstance(source, Fp8Block)
    weights, stats = quantize.dequantize_fp8_block(source, dtype, backend=backend)
    return [weights], stats


def _int8(source: Source, backend: str) -> Result:
    weight, stats = quantize.quantize_int8_channel(source, backend=backend)
    restored = [
        quantize.dequantize_int8_channel(weight, dtype, backend=backend)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return [weight.packed, weight.scale, *restored], stats


def _int4(source: Source, group_size: int, rule: str, backend: str) -> Result:
    weight, stats = quantize.quantize_int4_group(
        source, group_size=group_size, scale_rule=rule, backend=backend
    )
    restored = [
        quantize.dequantize_int4_group(weight, dtype, backend=backend)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return [weight.packed, weight.scale, *restored], stats


def _w4afp8(source: Source, backend: str) -> Result:
    weight, stats = quantize.quantize_w4afp8(source, backend=backend)
    restored = quantize.dequantize_w4afp8(weight, backend=backend)
    return [weight.packed, weight.scale, restored], stats


def operations(source: Source, columns: int) -> Iterator[tuple[str, Callable[[str], Result]]]:
    """Every operation that the source and its K allow, as functions of the backend."""
    if isinstance(source, Fp8Block):
        yield "to bf16", lambda backend: _from_fp8(source, torch.bfloat16, backend)
        yield "to fp32", lambda backend: _from_fp8(source, torch.float32, backend)
    else:
        yield "fp8", lambda backend: _fp8(source, False, backend)
        yield "fp8 ue8m0", lambda backend: _fp8(source, True, backend)
    if columns % 4 == 0:
        yield "int8", lambda backend: _int8(source, backend)
    if columns % 32 == 0:
        yield "int4 g32 mse", lambda backend: _int4(source, 32, "mse", backend)
    if columns % 64 == 0:
        yield "int4 g64", lambda backend: _int4(source, 64, "minmax", backend)
    if columns % 128 == 0:
        yield "int4 g128", lambda backend: _int4(source, 128, "minmax", backend)
        yield "int4 g128 mse", lambda backend: _int4(source, 128, "mse", backend)
        yield "w4afp8", lambda backend: _w4afp8(source, backend)


def same_bits(ours: Result, expected: Result) -> bool:
    """Equal dtypes, shapes, bytes (so that -0 is not 0) and statistics."""
    return ours[1] == expected[1] and all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))
        for one, other in zip(ours[0], expected[0], strict=True)
    )


def disagreements(shapes: list[tuple[int, int]], backend: str, device: str = "cpu") -> list[str]:
    """The cases on which a backend differs from the reference."""
    return [
        f"{name} {rows}x{columns} {operation}"
        for rows, columns in shapes
        for name, source in sources(rows, columns).items()
        for (operation, run), (_, run_there) in zip(
            operations(source, columns), operations(_on(source, device), columns), strict=True
        )
        if not same_bits(run_there(backend), run("reference"))
    ]


def _on(source: Source, device: str) -> Source:
    if isinstance(source, Fp8Block):
        return Fp8Block(source.codes.to(device), source.scale.to(device))
    return source.to(device)
