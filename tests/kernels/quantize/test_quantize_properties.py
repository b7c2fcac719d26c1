"""The error of every weight within the bound of its scheme, for weights of any magnitude."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_kernels import quantize

SLACK = 1 + 2.0**-20  # of the fp32 division before the rounding
SMALLEST = 2.0**-149


@st.composite
def weight_matrices(draw: st.DrawFn) -> torch.Tensor:
    """Gaussian, uniform or outlier weights at any exponent, some of them zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows, groups = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    weights = torch.randn(rows, 128 * groups, generator=generator)
    if draw(st.booleans()):
        weights = weights.pow(draw(st.sampled_from([3, 5, 9])))
    keep = torch.rand(weights.shape, generator=generator) < draw(st.sampled_from([0.01, 0.5, 1.0]))
    return torch.ldexp(weights * keep, torch.tensor(draw(st.integers(-148, 60))))


def distances(weights: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    return (weights.double() - restored.double()).abs()


@settings(max_examples=60, deadline=None)
@given(weight_matrices())
def test_int8_keeps_every_weight_within_half_a_step(weights: torch.Tensor) -> None:
    quantized, stats = quantize.quantize_int8_channel(weights)
    codes = quantized.packed.view(torch.uint8).int() - 128
    assert codes.abs().max() <= 127
    restored = quantize.dequantize_int8_channel(quantized, torch.float32)
    error = distances(weights, restored)
    assert (error <= quantized.scale.double() / 2 * SLACK).all()
    assert stats.max_error == error.max().float()
    assert (restored[weights == 0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(weight_matrices(), st.sampled_from([32, 64, 128]), st.sampled_from(["minmax", "mse"]))
def test_int4_gives_every_weight_its_nearest_code(
    weights: torch.Tensor, group_size: int, rule: str
) -> None:
    quantized, _ = quantize.quantize_int4_group(weights, group_size=group_size, scale_rule=rule)
    restored = quantize.dequantize_int4_group(quantized, torch.float32)
    error = distances(weights, restored)
    scale = quantized.scale.double().repeat_interleave(group_size, 1)
    codes = torch.arange(-8, 8, dtype=torch.float64)
    best = (weights.double()[..., None] - codes * scale[..., None]).abs().amin(-1)
    assert (error <= best + scale * 2.0**-20).all()
    if rule == "minmax":
        # amax = 7.5 scale but for the scale's rounding to bf16, and 7 is the largest code
        assert (error <= scale * (7.5 / (1 - 2.0**-8) - 7) * SLACK).all()
    assert (restored[weights == 0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(weight_matrices(), st.booleans())
def test_fp8_keeps_every_weight_within_half_a_step(weights: torch.Tensor, powers: bool) -> None:
    block, stats = quantize.quantize_fp8_block(weights, power_of_two_scale=powers)
    restored, _ = quantize.dequantize_fp8_block(block, torch.float32)
    scale = block.scale.double().repeat_interleave(128, 1)[:1, : weights.shape[1]]
    bound = torch.maximum(weights.double().abs() * 2.0**-4, scale * 2.0**-10) * SLACK + SMALLEST
    error = distances(weights, restored)
    assert (error <= bound).all()
    assert stats.max_error == error.max().float()
    assert (restored[weights == 0] == 0).all()
    if powers:
        assert (torch.frexp(block.scale)[0] == 0.5).all()


@settings(max_examples=40, deadline=None)
@given(weight_matrices())
def test_mse_never_loses_against_minmax(weights: torch.Tensor) -> None:
    minmax = quantize.quantize_int4_group(weights)[1].error_energy
    mse = quantize.quantize_int4_group(weights, scale_rule="mse")[1].error_energy
    assert mse <= minmax * (1 + 1e-12)


def test_scale_rules_reach_their_known_quality() -> None:
    weights = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    minmax = quantize.quantize_int4_group(weights)[1].sqnr_db
    mse = quantize.quantize_int4_group(weights, scale_rule="mse")[1].sqnr_db
    assert math.isclose(minmax, 19.1, abs_tol=0.1)
    assert mse > 19.8
