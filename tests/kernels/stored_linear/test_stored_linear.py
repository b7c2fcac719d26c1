"""Products with stored weights: every backend gives what the dense matrix gives, and refuses what
no quantization makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_kernels import quantize
from mtp_kernels.cpu.team import Team
from mtp_kernels.stored_linear import BACKENDS, StoredWeight, dequantize, linear
from mtp_kernels.stored_linear.weights import shape_of


def values(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def fp8_channel(weights: torch.Tensor) -> quantize.Fp8Channel:
    scale = weights.abs().amax(dim=1, keepdim=True) / 448
    return quantize.Fp8Channel((weights / scale).to(torch.float8_e4m3fn), scale.bfloat16())


FORMS: dict[str, Callable[[torch.Tensor], StoredWeight]] = {
    "float32": lambda weights: weights,
    "bf16": lambda weights: weights.bfloat16(),
    "fp8 blocks": lambda weights: quantize.quantize_fp8_block(weights)[0],
    "fp8 channels": fp8_channel,
    "int8": lambda weights: quantize.quantize_int8_channel(weights)[0],
    "int4 in 32": lambda weights: quantize.quantize_int4_group(weights, group_size=32)[0],
    "int4 in 128": lambda weights: quantize.quantize_int4_group(weights)[0],
    "w4afp8": lambda weights: quantize.quantize_w4afp8(weights)[0],
}
# Ragged panels, tiles, fp8 blocks and widths where the format allows it.
SHAPES = [(1, 128), (64, 512), (77, 1152), (200, 640)]
RAGGED = ["float32", "bf16", "fp8 blocks", "fp8 channels"]
CASES = [(form, shape) for form in FORMS for shape in SHAPES]
CASES += [(form, shape) for form in RAGGED for shape in [(3, 1), (9, 531), (130, 1027)]]


@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_products_are_those_of_the_dense_matrix(form: str, shape: tuple[int, int]) -> None:
    """Within float32's rounding of a float64 product, on one thread and on three."""
    weight = FORMS[form](values(*shape))
    dense = dequantize(weight, torch.float32).double()
    for rows in (0, 1, 4, 6, 259):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        exact = x.double() @ dense.t()
        for threads in (1, 3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Team, "threads_for", staticmethod(lambda work, t=threads: t))
                found = linear(x, weight)
            assert found.shape == exact.shape and found.dtype is torch.float32
            bound = 1e-6 * shape[1] ** 0.5 * float(exact.abs().max()) if rows else 0.0
            assert not rows or float((found - exact).abs().max()) <= bound


@pytest.mark.parametrize("form", FORMS)
def test_backends_agree(form: str) -> None:
    weight, x = FORMS[form](values(40, 256)), torch.randn(5, 256)
    reference = linear(x, weight, backend="reference")
    for backend in BACKENDS.keys() - {"triton_cuda"}:
        if form == "float32" and backend == "compiled_cpu":
            with pytest.raises(ValueError, match="does not multiply"):
                linear(x, weight, backend=backend)
            continue
        assert torch.allclose(linear(x, weight, backend=backend), reference, rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_lie_side_by_side() -> None:
    weight, x = FORMS["fp8 blocks"](values(40, 256)), torch.randn(256, 12).t()[::2]
    assert torch.allclose(linear(x, weight), linear(x.clone(), weight))


def test_bf16_rows_stay_bf16() -> None:
    weight, x = FORMS["int8"](values(40, 256)), torch.randn(5, 256, dtype=torch.bfloat16)
    assert linear(x, weight).dtype is torch.bfloat16


def damaged(weight: Any, field: str, value: float) -> Any:
    tensor = getattr(weight, field).clone()
    if tensor.dtype is torch.float8_e4m3fn:
        tensor.view(torch.uint8)[1, 7] = 0x7F  # NaN
    else:
        tensor[0, 0] = value
    return replace(weight, **{field: tensor})


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 channels"])
def test_codes_that_are_no_numbers_are_refused(form: str) -> None:
    with pytest.raises(ValueError, match="codes"):
        linear(torch.randn(3, 256), damaged(FORMS[form](values(40, 256)), "codes", 0.0))


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("float32", "bf16")])
@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -1.0, 0.0])
def test_scales_that_no_quantization_makes_are_refused(form: str, scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        linear(torch.randn(3, 256), damaged(FORMS[form](values(40, 256)), "scale", scale))


def test_rows_that_are_no_numbers_stay_none() -> None:
    """NaN of the rows is not taken for a damaged weight."""
    x = torch.randn(2, 256)
    x[1, 5] = torch.nan
    found = linear(x, FORMS["fp8 blocks"](values(40, 256)))
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_arguments_are_refused() -> None:
    weight = FORMS["int8"](values(40, 256))
    with pytest.raises(ValueError, match=r"expected \[T, 256\], found \[3, 255\]"):
        linear(torch.randn(3, 255), weight)
    with pytest.raises(ValueError, match="backend"):
        linear(torch.randn(3, 256), weight, backend="other")


@pytest.mark.parametrize("form", FORMS)
def test_shapes_of_stored_weights(form: str) -> None:
    assert shape_of(FORMS[form](values(5, 384))) == (5, 384)


def test_codes_and_scales_of_fp8_channels_that_do_not_fit() -> None:
    codes, scale = torch.zeros(3, 4).to(torch.float8_e4m3fn), torch.ones(3, 1)
    good = dequantize(quantize.Fp8Channel(codes, scale.bfloat16()), torch.float32)
    assert (good.dtype, good.tolist()) == (torch.float32, [[0.0] * 4] * 3)
    cases: list[tuple[torch.Tensor, torch.Tensor, str]] = [
        (codes, scale[:2], r"^channel scale: expected \[3, 1\], found \[2, 1\]$"),
        (codes, scale.expand(3, 2), r"^channel scale: expected \[3, 1\], found \[3, 2\]$"),
        (codes, scale[:, 0], r"^channel scale: expected \[3, 1\], found \[3\]$"),
        (codes, scale - 1, "^channel scale: expected finite numbers above 0$"),
        (codes[0], scale[:1], "^fp8 codes: "),
        (codes.float(), scale, "^fp8 codes: .*float8_e4m3fn"),
    ]
    for own, scales, says in cases:
        with pytest.raises((TypeError, ValueError), match=says):
            dequantize(quantize.Fp8Channel(own, scales), torch.float32)
    nan = torch.full((3, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="^e4m3 codes: expected numbers, found NaN$"):
        dequantize(quantize.Fp8Channel(nan, scale), torch.float32)
