"""nvfp4: what compressed-tensors makes of the same weights, the search for scales, and the number
that a whole matrix, or several, have in common."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import NvFp4, NvFp4Packed, WeightFormat
from mtp_kernels.quantize import array_conversions, block_floats
from mtp_kernels.quantize.array_conversions import Rows
from mtp_kernels.quantize.block_floats import E2M1, nvfp4_divisor

SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4A16)
COMPRESSOR = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def awkward() -> torch.Tensor:
    """Groups of zeros, of negative zeros, far smaller and far larger ones, and ties of codes."""
    weights = random(12, 64, seed=1)
    weights[0], weights[1], weights[2] = 0.0, -0.0, 0.3
    weights[3] *= 1e-37
    weights[4] *= 1e-9
    weights[5] *= 1e5
    weights[6] = torch.arange(64) % 16 / 2 - 3.75
    return weights


SOURCES = {"gaussian": random(64, 128), "awkward": awkward(), "zeros": torch.zeros(2, 32)}


@pytest.mark.parametrize("name", SOURCES)
def test_the_bytes_are_those_of_compressed_tensors(name: str) -> None:
    weights = SOURCES[name]
    of_matrix = generate_gparam(weights.min(), weights.max())
    groups = weights.unflatten(1, (-1, 16))
    wanted, _ = calculate_qparams(
        groups.amin(2), groups.amax(2), SCHEME.weights, global_scale=of_matrix
    )
    state = {"weight": weights, "weight_scale": wanted, "weight_global_scale": of_matrix}
    theirs = COMPRESSOR.compress(state, SCHEME)
    (codes, scale, own), _ = NvFp4Packed().quantize(weights, "minmax")
    assert torch.equal(own, of_matrix)
    assert torch.equal(scale.float(), theirs["weight_scale"].float())
    assert torch.equal(codes, theirs["weight_packed"])
    values = NvFp4Packed().encoded((codes, scale, own)).dequantize()
    decompressed = COMPRESSOR.decompress(dict(theirs), SCHEME)["weight"]  # in bf16
    torch.testing.assert_close(values, decompressed.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_compiled_rows_are_the_reference_to_the_bit(name: str, sweep: bool) -> None:
    weights = SOURCES[name]
    for divisor in (nvfp4_divisor(float(weights.abs().max())), 1.0, 37.0, 3e38):
        codes, scale, stats = block_floats.quantize_nvfp4(weights, divisor, sweep=sweep)
        found = array_conversions.quantize_nvfp4(
            weights.numpy(), array_conversions.NO_BLOCK_SCALE, divisor, sweep
        )
        assert found[0].tolist() == codes.tolist(), divisor
        assert found[1].tolist() == scale.view(torch.uint8).tolist(), divisor
        assert [one.tolist() for one in found[2]] == [one.tolist() for one in stats]


def test_no_scale_has_a_smaller_error_than_the_one_that_is_found() -> None:
    weights = random(4, 32, seed=3)
    divisor = nvfp4_divisor(float(weights.abs().max()))
    _, scale, _ = block_floats.quantize_nvfp4(weights, divisor, sweep=True)
    numbers = torch.tensor([*(-value for value in E2M1), *E2M1], dtype=torch.float64)
    for row, group in ((row, group) for row in range(4) for group in range(2)):
        own = weights[row, 16 * group : 16 * (group + 1)].double()
        errors = [
            float((own[:, None] - numbers * (value / divisor)).abs().amin(1).square().sum())
            for value in range_of_e4m3()
        ]
        best = range_of_e4m3()[errors.index(min(errors))]
        assert float(scale[row, group].float()) == best


def range_of_e4m3() -> list[float]:
    """The numbers above 0, by definition."""
    subnormal = [m * 2.0**-9 for m in range(1, 8)]
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    return [*subnormal, *normal[:-1]]


def test_a_number_of_the_matrix_may_be_that_of_a_larger_one() -> None:
    weights = random(4, 32)
    own = float(weights.abs().max())
    (_, _, alone), _ = NvFp4Packed().quantize(weights, "minmax")
    (codes, scale, joined), error = NvFp4Packed(amax=4 * own).quantize(weights, "minmax")
    assert alone.tolist() == [nvfp4_divisor(own)]
    assert joined.tolist() == [nvfp4_divisor(4 * own)] == [float(alone) / 4]
    values = NvFp4Packed().encoded((codes, scale, joined)).dequantize()
    assert error.max_error == float((weights - values).abs().max()) < own / 5
    assert NvFp4Packed(amax=1.0) == NvFp4Packed(), "it says nothing of what is stored"
    converted = NvFp4Packed().of_amax(4 * own).quantize_rows(Rows(weights.numpy()), "minmax")
    assert converted is not None
    assert converted.outputs[2].tolist() == joined.tolist()
    assert converted.outputs[0].tolist() == codes.tolist()


def test_the_number_of_a_matrix_of_nothing_is_one() -> None:
    assert nvfp4_divisor(0.0) == nvfp4_divisor(1e-45) == 1.0
    assert nvfp4_divisor(2688.0) == 1.0 and nvfp4_divisor(1.0) == 2688.0
    assert math.isfinite(nvfp4_divisor(1e-34))


def test_numbers_of_a_matrix_that_are_no_scales() -> None:
    NvFp4Packed().check_constants({"x": torch.tensor([1e-30])}, (2, 32))
    for value in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(InvalidInputError, match="Tensor x is no scale"):
            NvFp4Packed().check_constants({"x": torch.tensor([value])}, (2, 32))
    with pytest.raises(ValueError, match="^weights: expected finite numbers"):
        NvFp4Packed().quantize(torch.full((1, 16), torch.nan), "minmax")


@pytest.mark.parametrize("made", [NvFp4Packed(), NvFp4()])
def test_rows_of_codes_have_the_values(made: WeightFormat) -> None:
    tensors, _ = made.quantize(awkward(), "minmax")
    encoded = made.encoded(tensors)
    assert encoded.scale is not None
    rows = made.row_codes(encoded.codes, encoded.scale)
    assert torch.equal(rows.values(), encoded.dequantize())
    encoded.scale[3, 1] = float("nan")
    with pytest.raises(ValueError, match="group scale: expected finite numbers"):
        made.row_codes(encoded.codes, encoded.scale)
