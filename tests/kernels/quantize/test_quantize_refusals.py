"""Refused arguments, and the results of zeros."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from quantize_cases import Source, fp8_source, gaussian

from mtp_kernels import quantize
from mtp_kernels.quantize import ErrorStats, Fp8Block, Int4Group, Int8Channel, W4AFp8

both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])
QUANTIZERS: dict[str, Callable[..., object]] = {
    "int8": quantize.quantize_int8_channel,
    "int4": quantize.quantize_int4_group,
    "w4afp8": quantize.quantize_w4afp8,
}


@both_backends
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused(code: int, quantizer: str, backend: str) -> None:
    source = fp8_source(130, 256)
    source.codes.view(torch.uint8)[129, 200] = code
    source.codes.view(torch.uint8)[129, 201] = code
    with pytest.raises(ValueError, match=r"row 129, column 200 \(2 such"):
        QUANTIZERS[quantizer](source, backend=backend)
    with pytest.raises(ValueError, match=r"row 129, column 200 \(2 such"):
        quantize.dequantize_fp8_block(source, backend=backend)


@both_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(
    value: float, dtype: torch.dtype, backend: str
) -> None:
    weights = gaussian(5, 256).to(dtype)
    weights[3, 17] = value
    for quantizer in (*QUANTIZERS.values(), quantize.quantize_fp8_block):
        with pytest.raises(ValueError, match=r"row 3, column 17 \(1 such"):
            quantizer(weights, backend=backend)


@both_backends
def test_weights_beyond_the_format_are_refused(backend: str) -> None:
    weights = torch.zeros(2, 128)
    weights[1, 5] = -7.5 * (1 + 2**-10) * 2.0**125  # its code -8 at scale 2**125 is beyond fp32
    with pytest.raises(ValueError, match="row 1 are too large"):
        quantize.quantize_int4_group(weights, backend=backend)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_block_scales_are_refused(value: float) -> None:
    source = fp8_source(130, 256)
    source.scale[1, 0] = value
    for quantizer in (*QUANTIZERS.values(), quantize.dequantize_fp8_block):
        with pytest.raises(ValueError, match=r"fp8 block scale.*row 1, column 0"):
            quantizer(source)


def test_e8m0_nan_is_refused() -> None:
    codes = fp8_source(1, 128).codes
    scale = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match="fp8 block scale"):
        quantize.dequantize_fp8_block(Fp8Block(codes, scale))


@both_backends
def test_a_zero_scale_stands_for_a_zero_block_only(backend: str) -> None:
    source = fp8_source(130, 256)
    source.scale[1, 1] = 0.0
    with pytest.raises(ValueError, match=r"found 0 at block \(1, 1\)"):
        quantize.quantize_int8_channel(source, backend=backend)
    source.codes.view(torch.uint8)[128:, 128:] = 0
    weights, _ = quantize.dequantize_fp8_block(source, backend=backend)
    assert (weights[128:, 128:] == 0).all()


@both_backends
def test_zero_weights_have_zero_codes_and_scale_one(backend: str) -> None:
    weights = torch.zeros(3, 256)
    fp8, stats = quantize.quantize_fp8_block(weights, backend=backend)
    assert (fp8.scale == 1).all() and (fp8.codes.float() == 0).all()
    int8, _ = quantize.quantize_int8_channel(weights, backend=backend)
    assert (int8.scale == 1).all() and (int8.packed.view(torch.uint8) == 128).all()
    int4, _ = quantize.quantize_int4_group(weights, backend=backend)
    assert (int4.scale == 1).all() and (int4.packed.view(torch.uint8) == 0x88).all()
    w4afp8, _ = quantize.quantize_w4afp8(weights, backend=backend)
    assert (w4afp8.scale == 1).all() and (w4afp8.packed == 0).all()
    assert stats == ErrorStats(768, 0.0, 0.0, 0.0) and stats.sqnr_db == math.inf


@both_backends
@pytest.mark.parametrize("value", [0.3, -0.3])
def test_constant_groups(value: float, backend: str) -> None:
    weights = torch.full((2, 128), value)
    int8, _ = quantize.quantize_int8_channel(weights, backend=backend)
    restored = quantize.dequantize_int8_channel(int8, torch.float32, backend=backend)
    assert (restored / value - 1).abs().max() < 2**-8
    int4, _ = quantize.quantize_int4_group(weights, scale_rule="mse", backend=backend)
    restored = quantize.dequantize_int4_group(int4, torch.float32, backend=backend)
    assert (restored / value - 1).abs().max() < 2**-8


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("K = 200 is not divisible by the group size 128", lambda: int4(gaussian(2, 200))),
        ("expected one of .* found 48", lambda: int4(gaussian(2, 96), group_size=48)),
        ("K = 130 is not divisible by 4", lambda: quantize.quantize_int8_channel(gaussian(2, 130))),
        ("K = 64 .* 128", lambda: quantize.quantize_w4afp8(gaussian(2, 64))),
        ("scale rule", lambda: int4(gaussian(2, 128), scale_rule="best")),
        ("backend", lambda: int4(gaussian(2, 128), backend="quick")),
        ("backend cpu", lambda: int4(gaussian(2, 128).to("meta"), backend="cpu")),
        ("non-empty matrix", lambda: int4(torch.zeros(128))),
        ("non-empty matrix", lambda: int4(torch.zeros(0, 128))),
        (r"expected shape \[1, 2\]", lambda: int4(Fp8Block(fp8(2, 256).codes, torch.ones(2, 2)))),
        ("expected 2 rows and 1 col", lambda: unpack8(torch.zeros(2, 8), torch.ones(2, 2))),
        ("expected 2 rows and 8 or 4 or 2", lambda: unpack4(torch.zeros(2, 32), torch.ones(2, 3))),
        ("finite, above 0, found 0", lambda: unpack8(torch.zeros(2, 8), torch.zeros(2, 1))),
        ("finite, above 0, found nan", lambda: unpack4(torch.zeros(1, 4), torch.ones(1, 1) * nan)),
    ],
)
def test_wrong_values_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: int4(torch.zeros(2, 128, dtype=torch.float64)),
        lambda: int4(fp8(2, 128).codes),
        lambda: quantize.quantize_fp8_block(fp8(2, 128).codes),
        lambda: int4([[0.0]]),
        lambda: quantize.dequantize_fp8_block(fp8(2, 128), torch.float16),
        lambda: quantize.dequantize_int8_channel(
            Int8Channel(torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 1))
        ),
        lambda: quantize.dequantize_w4afp8(
            W4AFp8(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1))
        ),
    ],
)
def test_wrong_dtypes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="expected"):
        call()


nan = math.nan
int4: Callable[..., object] = quantize.quantize_int4_group
fp8: Callable[..., Fp8Block] = fp8_source


def unpack8(packed: torch.Tensor, scale: torch.Tensor) -> Source:
    return quantize.dequantize_int8_channel(Int8Channel(packed.int(), scale.bfloat16()))


def unpack4(packed: torch.Tensor, scale: torch.Tensor) -> Source:
    return quantize.dequantize_int4_group(Int4Group(packed.int(), scale.bfloat16()))
