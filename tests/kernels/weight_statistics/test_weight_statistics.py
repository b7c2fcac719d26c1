"""Statistics of codes are those of the values that they stand for, in every format and backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mtp_kernels import quantize
from mtp_kernels import weight_statistics as statistics
from mtp_kernels.quantize import Fp8Block, Fp8Channel, Int4Group, Int8Channel, W4AFp8
from mtp_kernels.weight_statistics import WeightStatistics

BACKENDS = list(statistics.BACKENDS)
TOLERANCE = 1e-5  # of sums of squares, relative
SHAPES = [(260, 384), (7, 256), (129, 128), (1, 128)]
RAGGED = [(129, 96), (5, 130), (1, 1), (300, 1000)]
Measure = Callable[[str], WeightStatistics]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def awkward(*shape: int) -> torch.Tensor:
    """Zeros of both signs, subnormals and wide ranges."""
    values = random(*shape)
    values[::3] *= 1e-30
    values[1::5] *= 1e-40
    values[2::7] = -0.0
    values[-1] *= 1e15
    return values


def fp8(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Every finite code, in turn where they fit."""
    bits = torch.arange(rows * columns).mul(7 + seed).to(torch.uint8).view(rows, columns)
    bits[(bits & 0x7F) == 0x7F] = 0x7E
    return bits.view(torch.float8_e4m3fn)


def block_scale(codes: torch.Tensor) -> torch.Tensor:
    blocks = [-(-size // 128) for size in codes.shape]
    return torch.rand(blocks, generator=torch.Generator().manual_seed(1)) * 1e-3 + 1e-4


def formats(rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor, Measure]]:
    """A weight in each format that the shape allows: its values, and their statistics."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, values in (("even", random(rows, columns)), ("awkward", awkward(rows, columns))):
            kept = values.clamp(-6e4, 6e4).to(dtype)
            yield f"{name} {dtype}", kept.float(), measuring(statistics.float_statistics, kept)
    codes, rates = fp8(rows, columns), random(rows, 1).abs() + 1e-3
    block = Fp8Block(codes, block_scale(codes))
    powers = Fp8Block(codes, torch.exp2(block.scale.log2().round()).to(torch.float8_e8m0fnu))
    for name, one in (("fp8 blocks", block), ("fp8 blocks e8m0", powers)):
        values = quantize.dequantize_fp8_block(one, torch.float32)[0]
        yield name, values, measuring(statistics.quantized_statistics, one)
    channels = measuring(statistics.quantized_statistics, Fp8Channel(codes, rates))
    yield "fp8 channels", codes.float() * rates, channels
    weights = random(rows, columns, seed=2)
    if columns % 4 == 0:
        int8 = quantize.quantize_int8_channel(weights)[0]
        values = quantize.dequantize_int8_channel(int8, torch.float32)
        yield "int8", values, measuring(statistics.quantized_statistics, int8)
    for size in (32, 64, 128):
        if columns % size == 0:
            int4 = quantize.quantize_int4_group(weights, group_size=size)[0]
            values = quantize.dequantize_int4_group(int4, torch.float32)
            yield f"int4 of {size}", values, measuring(statistics.quantized_statistics, int4)
    if columns % 128 == 0:
        w4afp8 = quantize.quantize_w4afp8(weights)[0]
        values = quantize.dequantize_w4afp8(w4afp8, torch.float32)
        yield "w4afp8", values, measuring(statistics.quantized_statistics, w4afp8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [*SHAPES, *RAGGED], ids=str)
def test_statistics_are_those_of_the_values(shape: tuple[int, int], backend: str) -> None:
    for name, values, measure in formats(*shape):
        found = measure(backend)
        assert found.is_sound, name
        assert found.elements == values.numel(), name
        assert (found.low, found.high) == (float(values.min()), float(values.max())), name
        wanted = float(values.double().square().sum())
        assert math.isclose(found.square_sum, wanted, rel_tol=TOLERANCE), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backends_agree_on_every_count(shape: tuple[int, int]) -> None:
    for name, _, measure in formats(*shape):
        reference, compiled = measure("reference"), measure("cpu")
        assert math.isclose(reference.square_sum, compiled.square_sum, rel_tol=TOLERANCE), name
        counts = [
            (s.outer_codes, s.blocks, s.full_blocks, s.power_of_two_scales)
            for s in (reference, compiled)
        ]
        assert counts[0] == counts[1], name


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_at_the_ends_of_their_range_are_counted(backend: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    int8 = Int8Channel(every.view(torch.int32).view(2, 32), torch.ones(2, 1).bfloat16())
    found = statistics.quantized_statistics(int8, backend=backend)
    assert found.outer_codes == 65 + 64  # codes -128 to -64, and 64 to 127
    pairs = every.view(2, 128)
    int4 = Int4Group(pairs.view(torch.int32), torch.ones(2, 8).bfloat16())
    found = statistics.quantized_statistics(int4, backend=backend)
    assert found.outer_codes == 32 * (4 + 3)  # -8 to -5, and 5 to 7, in either nibble
    signed = W4AFp8((pairs ^ 0x88).view(torch.int8), torch.ones(2, 2))
    assert statistics.quantized_statistics(signed, backend=backend).outer_codes == 32 * 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_told_by_their_largest_code(backend: str) -> None:
    codes = torch.zeros(200, 400)
    codes[0, 0], codes[130, 130], codes[5, 300], codes[199, 399] = 448, -448, 240, -0.0
    weight = Fp8Block(codes.to(torch.float8_e4m3fn), torch.ones(2, 4))
    found = statistics.quantized_statistics(weight, backend=backend)
    assert (found.blocks, found.full_blocks, found.power_of_two_scales) == (3, 2, True)
    other = Fp8Block(weight.codes, torch.full((2, 4), 0.75))
    assert not statistics.quantized_statistics(other, backend=backend).power_of_two_scales


def unsound(place: tuple[int, int]) -> Iterator[tuple[str, Measure]]:
    """A weight of each format that cannot be decoded, or has a value that is not finite."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wrong in (math.nan, math.inf, -math.inf):
            values = random(260, 256).to(dtype)
            values[place] = wrong
            yield f"{wrong} in {dtype}", measuring(statistics.float_statistics, values)
    codes, ones = fp8(260, 256), torch.ones(260, 1)
    scale = block_scale(codes)
    for bits in (0x7F, 0xFF):
        damaged = codes.clone()
        damaged.view(torch.uint8)[place] = bits
        block = measuring(statistics.quantized_statistics, Fp8Block(damaged, scale))
        yield f"code {bits:x} in a block", block
        yield (
            f"code {bits:x}",
            measuring(statistics.quantized_statistics, Fp8Channel(damaged, ones)),
        )
    weights, row, tile = random(260, 256), (place[0], 0), (place[0] // 128, place[1] // 128)
    int8, int4 = (
        quantize.quantize_int8_channel(weights)[0],
        quantize.quantize_int4_group(weights)[0],
    )
    w4afp8, group = quantize.quantize_w4afp8(weights)[0], (place[0], place[1] // 128)
    for wrong in (0.0, -1.0, math.nan, math.inf, 3e38):
        block = Fp8Block(codes, changed(scale, tile, wrong))
        eight = Int8Channel(int8.packed, changed(int8.scale, row, wrong))
        four = Int4Group(int4.packed, changed(int4.scale, group, wrong))
        signed = W4AFp8(w4afp8.packed, changed(w4afp8.scale, group, wrong))
        channel = Fp8Channel(codes, changed(ones, row, wrong))
        yield f"block {wrong}", measuring(statistics.quantized_statistics, block)
        yield f"channel {wrong}", measuring(statistics.quantized_statistics, channel)
        yield f"int8 {wrong}", measuring(statistics.quantized_statistics, eight)
        yield f"int4 {wrong}", measuring(statistics.quantized_statistics, four)
        yield f"w4afp8 {wrong}", measuring(statistics.quantized_statistics, signed)


def measuring(function: Callable[..., WeightStatistics], *weight: Any) -> Measure:
    return lambda backend: function(*weight, backend=backend)


def changed(scale: torch.Tensor, at: tuple[int, int], value: float) -> torch.Tensor:
    copy = scale.clone()
    copy[at] = value
    return copy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [(0, 0), (131, 200), (259, 255)], ids=str)
def test_what_cannot_be_decoded_is_unsound(place: tuple[int, int], backend: str) -> None:
    for name, measure in unsound(place):
        assert not measure(backend).is_sound, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_zero_scale_stands_for_a_block_of_zeros(backend: str) -> None:
    codes = torch.zeros(256, 128, dtype=torch.float8_e4m3fn)
    codes[:128] = 1.0
    scale = torch.tensor([[1.0], [0.0]])
    assert statistics.quantized_statistics(Fp8Block(codes, scale), backend=backend).is_sound
    codes[200, 5] = 1.0
    assert not statistics.quantized_statistics(Fp8Block(codes, scale), backend=backend).is_sound


def test_statistics_of_pieces_add_up() -> None:
    values = random(260, 384)
    parts = [statistics.float_statistics(values[at : at + 100]) for at in (0, 100, 200)]
    joined, whole = parts[0] + parts[1] + parts[2], statistics.float_statistics(values)
    assert (joined.elements, joined.low) == (whole.elements, whole.low)
    assert joined.high == whole.high
    assert math.isclose(joined.square_sum, whole.square_sum, rel_tol=TOLERANCE)
    constant = statistics.float_statistics(torch.full((3,), 2.0))
    other = statistics.float_statistics(torch.full((3,), 3.0))
    assert constant.is_constant and other.is_constant and not (constant + other).is_constant
    assert not statistics.float_statistics(torch.full((1,), 2.0)).is_constant


@pytest.mark.parametrize("backend", BACKENDS)
def test_difference_of_values(backend: str) -> None:
    wanted, found = random(300, 130), random(300, 130, seed=5)
    result = statistics.difference(wanted, found, backend=backend)
    error = found.double() - wanted.double()
    assert math.isclose(result.signal, float(wanted.double().square().sum()), rel_tol=1e-12)
    assert math.isclose(result.noise, float(error.square().sum()), rel_tol=1e-12)
    assert result.largest == float(error.abs().max())
    assert statistics.difference(wanted, wanted, backend=backend).sqnr_db == math.inf
    assert statistics.difference(wanted * 0, found, backend=backend).sqnr_db == -math.inf


def test_figures_are_joined_one_by_one() -> None:
    one = WeightStatistics(2, -1.0, 3.0, 18.0, 1, 2, 1, power_of_two_scales=True)
    other = WeightStatistics(3, -2.0, 1.0, 5.0, 4, 5, 3, power_of_two_scales=False)
    both = WeightStatistics(5, -2.0, 3.0, 23.0, 5, 7, 4, power_of_two_scales=False)
    assert one + other == other + one == both
    assert WeightStatistics() + one == one and WeightStatistics() + other == other
    assert (one + one).power_of_two_scales
    assert one.root_mean_square == 3.0 and WeightStatistics().root_mean_square == 0.0
    assert WeightStatistics(1, square_sum=4.0).root_mean_square == 2.0
    assert not WeightStatistics(2, 1.0, 1.5).is_constant
    assert WeightStatistics(2, 1.0, 1.0).is_constant
    assert not statistics.UNSOUND.is_sound and WeightStatistics().is_sound
    assert not (one + statistics.UNSOUND).is_sound


def test_differences_are_joined_one_by_one() -> None:
    one, other = statistics.Difference(90.0, 0.5, 2.0), statistics.Difference(10.0, 0.5, 3.0)
    assert one + other == other + one == statistics.Difference(100.0, 1.0, 3.0)
    assert statistics.Difference() + one == one
    assert (one + other).sqnr_db == 20.0
    assert statistics.Difference(1.0, 0.0, 0.0).sqnr_db == math.inf
    assert statistics.Difference(0.0, 1.0, 1.0).sqnr_db == -math.inf
    assert statistics.Difference().sqnr_db == math.inf


def test_a_backend_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="backend"):
        statistics.float_statistics(torch.ones(3), backend="gpu")
