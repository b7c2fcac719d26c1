"""mxfp4 and mxfp8: the codes that compressed-tensors makes under our scales, and the exponents."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, MXFP8

from mtp_checkpoints.formats import MxFp4Packed, MxFp8, WeightFormat
from mtp_kernels.quantize import array_conversions
from mtp_kernels.quantize.array_conversions import Rows


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def awkward() -> torch.Tensor:
    """Groups of zeros, of subnormal and huge numbers, ties, and amax around the largest code."""
    weights = random(14, 64, seed=1)
    weights[0], weights[1], weights[2] = 0.0, -0.0, 0.3
    for row, factor in ((3, 1e-37), (4, 1e-44), (5, 1e36), (6, 1e-9)):
        weights[row] *= factor
    weights[7] = torch.arange(64) % 16 / 2 - 3.75
    for row, top in ((8, 6.0), (9, 448.0), (10, 7.0), (11, 480.0)):
        weights[row, 5], weights[row, 40] = top, math.nextafter(top, math.inf) * 1.0001
    return weights


SOURCES = {"gaussian": random(64, 128), "awkward": awkward()}
FORMATS: dict[WeightFormat, tuple[float, dict[str, Any], Callable[..., Any]]] = {
    MxFp4Packed(): (6.0, MXFP4A16, array_conversions.quantize_mxfp4),
    MxFp8(): (448.0, MXFP8, array_conversions.quantize_mxfp8),
}
each_format = pytest.mark.parametrize("made", FORMATS, ids=lambda made: str(made.storage))


@each_format
@pytest.mark.parametrize("name", SOURCES)
def test_the_codes_are_those_of_compressed_tensors(name: str, made: Any) -> None:
    """Under our scales: by its rule of exponents numbers may be clipped."""
    weights, (_, scheme, _) = SOURCES[name], FORMATS[made]
    compressor = BaseCompressor.get_value_from_registry(made.layout)
    (codes, scale), _ = made.quantize(weights, "minmax")
    powers = torch.exp2(scale.float() - 127)
    plan = QuantizationScheme(targets=["Linear"], **scheme)
    theirs = compressor.compress({"weight": weights, "weight_scale": powers}, plan)
    own = theirs["weight_packed" if made == MxFp4Packed() else "weight"]
    assert torch.equal(own.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(theirs["weight_scale"], scale)


@each_format
@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_compiled_rows_are_the_reference_to_the_bit(name: str, sweep: bool, made: Any) -> None:
    weights, compiled = SOURCES[name], FORMATS[made][2]
    codes, scale, stats = made.rows_of(weights, sweep=sweep)
    found = compiled(weights.numpy(), array_conversions.NO_BLOCK_SCALE, sweep)
    assert found[0].tolist() == codes.view(torch.uint8).tolist()
    assert found[1].tolist() == scale.tolist()
    assert [one.tolist() for one in found[2]] == [one.tolist() for one in stats]
    converted = made.quantize_rows(Rows(weights.numpy()), "mse" if sweep else "minmax")
    assert converted is not None and converted.outputs[1].tolist() == scale.tolist()


@each_format
def test_the_power_of_two_is_the_least_that_clips_nothing(made: Any) -> None:
    top = FORMATS[made][0]
    weights = SOURCES["awkward"]
    (_, scale), _ = made.quantize(weights, "minmax")
    for amax, code in zip(
        weights.unflatten(1, (-1, 32)).abs().amax(2).flatten().tolist(),
        scale.flatten().tolist(),
        strict=True,
    ):
        if amax == 0:
            assert code == 127
            continue
        assert amax <= top * 2.0 ** (code - 127) or code == 254
        assert amax > top * 2.0 ** (code - 128) or code == 0


@each_format
def test_half_the_scale_is_taken_where_that_loses_less(made: Any) -> None:
    weights = random(64, 256, seed=2)
    weights[0, :32] = 3 * 2.0**-9  # which is no number of e4m3 under a scale of 2
    weights[0, 0] = 449.0
    (_, whole), error = made.quantize(weights, "minmax")
    (_, swept), less = made.quantize(weights, "mse")
    assert less.error_energy < error.error_energy
    assert set((whole.int() - swept.int()).flatten().tolist()) == {0, 1}


@each_format
def test_an_exponent_that_is_no_number(made: Any) -> None:
    (codes, scale), _ = made.quantize(random(2, 64), "minmax")
    scale[1, 1] = 255
    with pytest.raises(ValueError, match="exponents below 255"):
        made.encoded((codes, scale)).dequantize()
    assert math.isnan(made.encoded((codes, scale)).statistics().square_sum)
    if made == MxFp8():
        scale[1, 1], codes.view(torch.uint8)[0, 0] = 127, 0x7F
        with pytest.raises(ValueError, match="found NaN"):
            made.encoded((codes, scale)).dequantize()


@each_format
@pytest.mark.parametrize("factor", [2, -2])
def test_exponents_that_are_off_by_one_are_undone(made: Any, factor: int) -> None:
    weights = random(8, 64)
    (codes, scale), _ = made.quantize(weights, "minmax")
    shifted = made.encoded((codes, (scale.int() - factor // 2).to(torch.uint8)))
    words = "small" if factor > 0 else "large"
    (bug,) = [bug for bug in made.bugs if bug.cause.endswith(f"one too {words}")]
    undone = made.decode(*bug.undo(shifted.codes, shifted.scale), torch.float32)
    assert torch.equal(undone, made.encoded((codes, scale)).dequantize())


@pytest.mark.parametrize("made", [MxFp4Packed(), MxFp8()])
def test_rows_of_codes_have_the_values(made: Any) -> None:
    (codes, stored), _ = made.quantize(awkward(), "minmax")
    encoded = made.encoded((codes, stored))
    rows = made.row_codes(codes, encoded.scale)
    assert torch.equal(rows.values(), encoded.dequantize())
    if codes.dtype is torch.float8_e4m3fn:
        damaged = codes.clone()
        damaged.view(torch.uint8)[3, 3] = 0x7F
        with pytest.raises(ValueError, match="finite e4m3 codes"):
            made.row_codes(damaged, encoded.scale)
    stored[2, 1] = 255
    with pytest.raises(ValueError, match="exponents below 255"):
        made.row_codes(codes, made.encoded((codes, stored)).scale)
