"""Our numbers against torch, compressed-tensors and an unpacker written from a description."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from mtp_kernels import quantize
from mtp_kernels.quantize import Fp8Block, W4AFp8
from quantize_cases import Source, awkward, fp8_source, gaussian

PACKER = BaseCompressor.get_value_from_registry("pack-quantized")
SOURCES: dict[str, Source] = {
    "fp32": gaussian(256, 512),
    "bf16": gaussian(256, 512).to(torch.bfloat16),
    "awkward": awkward(40, 384),
    "fp8": fp8_source(256, 512),
}
both_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


def scheme(bits: int, group_size: int | None) -> QuantizationScheme:
    strategy = "channel" if group_size is None else "group"
    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy=strategy, group_size=group_size
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def fp32_weights(source: Source) -> torch.Tensor:
    if isinstance(source, Fp8Block):
        wide = source.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = source.codes.shape
        return source.codes.float() * wide[:rows, :columns]
    return source.float()


def check_packed(
    source: Source, packed: torch.Tensor, scale: torch.Tensor, ours: torch.Tensor, bits: int
) -> None:
    groups = scale.shape[1]
    weights = fp32_weights(source)
    plan = scheme(bits, weights.shape[1] // groups if bits == 4 else None)
    compressed = PACKER.compress({"weight": weights, "weight_scale": scale}, plan)
    assert torch.equal(packed, compressed["weight_packed"])
    state = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor(weights.shape),
    }
    theirs = PACKER.decompress(state, plan)["weight"]
    assert theirs.dtype == ours.dtype == torch.bfloat16
    assert torch.equal(theirs.view(torch.int16), ours.view(torch.int16))


@both_backends
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("rule", ["minmax", "mse"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_is_what_compressed_tensors_packs_and_unpacks(
    name: str, rule: str, group_size: int, backend: str
) -> None:
    weight, _ = quantize.quantize_int4_group(
        SOURCES[name], group_size=group_size, scale_rule=rule, backend=backend
    )
    ours = quantize.dequantize_int4_group(weight, backend=backend)
    check_packed(SOURCES[name], weight.packed, weight.scale, ours, bits=4)


@both_backends
@pytest.mark.parametrize("name", SOURCES)
def test_int8_is_what_compressed_tensors_packs_and_unpacks(name: str, backend: str) -> None:
    weight, _ = quantize.quantize_int8_channel(SOURCES[name], backend=backend)
    ours = quantize.dequantize_int8_channel(weight, backend=backend)
    check_packed(SOURCES[name], weight.packed, weight.scale, ours, bits=8)


def test_minmax_scale_is_that_of_compressed_tensors() -> None:
    weights = gaussian(64, 256)
    groups = weights.unflatten(1, (-1, 128))
    arguments = scheme(4, 128).weights
    assert arguments is not None
    expected, _ = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
    weight, _ = quantize.quantize_int4_group(weights)
    assert torch.equal(weight.scale, expected.to(torch.bfloat16))


def unpack_w4afp8(weight: W4AFp8) -> torch.Tensor:
    """Element by element, from the layout's description alone."""
    rows, half = weight.packed.shape
    out = torch.empty(rows, 2 * half)
    for row in range(rows):
        for k in range(2 * half):
            byte = int(weight.packed[row, k // 2]) & 0xFF
            nibble = byte >> 4 if k % 2 else byte & 0xF
            code = nibble - 16 if nibble >= 8 else nibble
            out[row, k] = torch.tensor(float(code)) * weight.scale[row, k // 128]
    return out


@both_backends
def test_w4afp8_is_its_description(backend: str) -> None:
    source = fp8_source(6, 256)
    weight, stats = quantize.quantize_w4afp8(source, backend=backend)
    expected = unpack_w4afp8(weight)
    restored = quantize.dequantize_w4afp8(weight, torch.float32, backend=backend)
    assert torch.equal(restored, expected)
    assert torch.equal(weight.scale, weight.scale.bfloat16().float())
    error = (fp32_weights(source) - expected).double().square().sum()
    assert stats.error_energy == pytest.approx(error.item(), rel=1e-12)


@both_backends
def test_every_e4m3_code_is_decoded_as_torch_does(backend: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()].reshape(2, 127)
    for value in (1.0, 3e-4, 7e-40, 1e30):
        scale = torch.tensor([[value]])
        weights, _ = quantize.dequantize_fp8_block(
            Fp8Block(finite, scale), torch.float32, backend=backend
        )
        expected = finite.float() * scale
        assert torch.equal(weights.view(torch.int32), expected.view(torch.int32))


@both_backends
def test_every_rounding_to_e4m3_is_torchs(backend: str) -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    below = torch.nextafter(middles, torch.tensor(0.0))
    above = torch.nextafter(middles, torch.tensor(math.inf))
    values = torch.cat((codes, middles, below, above))
    weights = torch.stack((values, -values))
    assert weights.shape[1] > 3 * 128
    weights[:, ::128] = 448.0  # amax of every block, hence scale 1
    block, _ = quantize.quantize_fp8_block(weights, backend=backend)
    assert (block.scale == 1).all()
    expected = weights.to(torch.float8_e4m3fn)
    assert torch.equal(block.codes.view(torch.uint8), expected.view(torch.uint8))


@both_backends
def test_bf16_output_is_torchs_rounding(backend: str) -> None:
    source = fp8_source(200, 300)
    weights, stats = quantize.dequantize_fp8_block(source, backend=backend)
    expected = fp32_weights(source)
    assert torch.equal(weights, expected.bfloat16())
    error = (expected - weights.float()).double()
    assert stats.error_energy == pytest.approx(error.square().sum().item(), rel=1e-12)
    assert stats.signal_energy == pytest.approx(expected.double().square().sum().item(), rel=1e-12)
    assert stats.max_error == error.abs().max().item()
    assert stats.elements == 200 * 300
