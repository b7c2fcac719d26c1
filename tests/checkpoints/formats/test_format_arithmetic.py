"""Weight formats one by one: tensors of those that are only read, and all ways to their numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cases import WRITTEN
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.formats import (
    FORMATS,
    UNQUANTIZED,
    AutoRoundInt8,
    AwqInt4,
    EncodedWeight,
    FormatOptions,
    Fp8Block,
    Fp8Channel,
    Fp8Tensor,
    GptqInt4,
    GptqInt8,
    Int4Group,
    Int4ZeroPoints,
    Int8Channel,
    Int8Unpacked,
    Int8ZeroPoints,
    MxFp4Packed,
    MxFp8,
    NvFp4,
    NvFp4Packed,
    W4AFp8,
    WeightFormat,
    unquantized,
)
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_checkpoints.formats.compressed import WeightsEntry
from mtp_checkpoints.formats.ggml_blocks import Q4
from mtp_checkpoints.weights.weight_values import Rounding
from mtp_kernels import quantize, weight_statistics
from mtp_kernels.cpu.torch_threads import torch_threads_for
from mtp_kernels.quantize.array_conversions import Rows

NAME = "model.layers.1.mlp.down_proj.weight"
MODULE = NAME.removesuffix(".weight")
Layout = list[tuple[str, str, tuple[int, ...]]]


def words(groups: int, zero_words: int = 4) -> Layout:
    return [("scales", "F16", (groups, 32)), ("qzeros", "I32", (groups, zero_words))]


READ: list[tuple[WeightFormat, Layout]] = [
    (AwqInt4(64), [("qweight", "I32", (256, 4)), *words(4)]),
    (AwqInt4(-1), [("qweight", "I32", (256, 4)), *words(1)]),
    (GptqInt4(64), [("qweight", "I32", (32, 32)), *words(4), ("g_idx", "I32", (256,))]),
    (GptqInt4(-1), [("qweight", "I32", (32, 32)), *words(1), ("g_idx", "I32", (256,))]),
    (GptqInt8(64), [("qweight", "I32", (64, 32)), *words(4, 8), ("g_idx", "I32", (256,))]),
    (AutoRoundInt8(64), [("qweight", "I32", (64, 32)), *words(4, 8)]),
    (AutoRoundInt8(-1), [("qweight", "I32", (64, 32)), *words(1, 8)]),
    (Int4ZeroPoints(64), [
        ("weight_packed", "I32", (32, 32)), ("weight_scale", "BF16", (32, 4)),
        ("weight_shape", "I64", (2,)), ("weight_zero_point", "I32", (4, 4)),
    ]),
    (Int8ZeroPoints(-1), [
        ("weight_packed", "I32", (32, 64)), ("weight_scale", "BF16", (32, 1)),
        ("weight_shape", "I64", (2,)), ("weight_zero_point", "I32", (8, 1)),
    ]),
    (NvFp4(), [
        ("weight", "U8", (32, 128)), ("weight_scale", "F8_E4M3", (32, 16)),
        ("weight_scale_2", "F32", ()), ("input_scale", "F32", ()),
    ]),
    (Fp8Tensor(), [
        ("weight", "F8_E4M3", (32, 256)), ("weight_scale", "F32", ()), ("input_scale", "F32", ()),
    ]),
    (Fp8Channel(), [("weight", "F8_E4M3", (32, 256)), ("weight_scale", "F32", (32, 1))]),
]  # fmt: skip


@pytest.mark.parametrize(("one", "layout"), READ, ids=lambda one: str(one)[:12])
def test_tensors_of_formats_that_are_read(one: WeightFormat, layout: Layout) -> None:
    wanted = [OutputTensor(f"{MODULE}.{name}", dtype, shape) for name, dtype, shape in layout]
    found = one.tensors(NAME, (32, 256))
    assert list(found) == wanted
    halves = ("F16", "BF16", "F32")
    floats: dict[type, tuple[str, ...]] = {
        Fp8Channel: ("F32", "BF16", "F16"), AwqInt4: halves, GptqInt4: halves,
        GptqInt8: halves, AutoRoundInt8: halves,
        Int4ZeroPoints: ("BF16", "F16", "F32"), Int8ZeroPoints: ("BF16", "F16", "F32"),
    }  # fmt: skip
    for number, tensor in enumerate(found):
        other = floats.get(type(one)) if number == 1 else None
        assert one.accepted_dtypes(tensor) == (other or (tensor.dtype,))


@pytest.mark.parametrize(
    ("one", "storage", "divisor", "elements", "rows", "words"),
    [
        (AwqInt4(64), "awq_int4", 64, 1, 1, 8),
        (GptqInt4(-1), "gptq_int4", 8, 1, 1, 8),
        (GptqInt8(-1), "gptq_int8", 4, 1, 1, 4),
        (AutoRoundInt8(32), "auto_round_int8", 32, 1, 1, 4),
        (Int4ZeroPoints(32), "int4_zero_points", 32, 1, 1, 8),
        (Int8ZeroPoints(-1), "int8_zero_points", 4, 1, 1, 4),
        (NvFp4(), "nvfp4", 16, 2, 1, 0),
        (Fp8Tensor(), "fp8_tensor", 1, 1, 1, 0),
        (Fp8Channel(), "fp8_channel", 1, 1, 1, 0),
        (Fp8Block(), "fp8_block", 1, 1, 128, 0),
        (Int4Group(32), "int4_group", 32, 8, 1, 0),
    ],
)
def test_units_of_a_format(
    one: WeightFormat, storage: str, divisor: int, elements: int, rows: int, words: int
) -> None:
    assert one.storage is storage
    assert (one.k_divisor, one.elements_per_code) == (divisor, elements)
    assert (one.scale_rows, one.word_rows) == (rows, words)
    assert FORMATS[storage] is type(one)
    if isinstance(one, ReadOnlyFormat):
        assert (one.operation, one.constants((32, 256))) == ("", ())


@pytest.mark.parametrize("form", [Fp8Tensor(), Int8Unpacked()])
def test_codes_of_others_as_the_decoder_packs_them(form: WeightFormat) -> None:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    codes, scale = values.to(torch.float8_e4m3fn), torch.full((1, 1), 0.25)
    if isinstance(form, Int8Unpacked):
        codes, scale = (30 * values).to(torch.int8), torch.rand(8, 1).bfloat16()
    rows = form.row_codes(codes, scale)
    assert torch.equal(rows.values(), form.decode(codes, scale, torch.float32))
    with pytest.raises(ValueError, match="finite"):
        form.row_codes(codes, scale * torch.nan)


def test_fp8_per_channel_in_a_config() -> None:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
        "output_activations": None,
        "format": "float-quantized",
    }
    assert Fp8Channel().group(activations_fp8=False) == group
    for change, found in (
        ({}, Fp8Channel()),
        ({"num_bits": 4}, None),
        ({"type": "int"}, None),
        ({"strategy": "token"}, None),
    ):
        entry = WeightsEntry.of(group | {"weights": group["weights"] | change}, None)  # type: ignore[operator]
        assert entry is not None
        assert Fp8Channel.of_entry(entry) == found
        assert Fp8Channel.of_entry(replace(entry, layout="pack-quantized")) is None


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CONVERTED = [
    Fp8Block(),
    Fp8Channel(),
    Int8Channel(),
    Int4Group(64),
    W4AFp8(),
    NvFp4Packed(),
    NvFp4(),
    MxFp4Packed(),
    MxFp8(),
]


@pytest.mark.parametrize("one", CONVERTED, ids=lambda one: str(one.storage))
def test_ways_to_the_numbers_of_a_weight(one: WeightFormat) -> None:
    """Values, statistics, products, and what other formats are made of."""
    weights, x = random(140, 256), random(3, 256, seed=1)
    tensors, error = one.quantize(weights, "minmax")
    assert error.elements == weights.numel()
    encoded = one.encoded(tensors)
    codes, scale = encoded.codes, encoded.scale
    assert scale is not None
    values = encoded.dequantize()
    lost = (weights - values).double()
    assert error.signal_energy == pytest.approx(float(weights.double().square().sum()), rel=1e-6)
    assert error.error_energy == pytest.approx(float(lost.square().sum()), rel=1e-3)
    assert error.max_error == pytest.approx(float(lost.abs().max()), rel=1e-3)
    assert encoded.shape == (140, 256)
    statistics = encoded.statistics()
    wanted = weight_statistics.float_statistics(values)
    figures = ("elements", "low", "high")
    assert [getattr(statistics, f) for f in figures] == [getattr(wanted, f) for f in figures]
    assert statistics.square_sum == pytest.approx(wanted.square_sum, rel=1e-5)
    torch.testing.assert_close(encoded.product(x), x @ values.t(), rtol=1e-4, atol=1e-3)
    source = one.source(codes, scale)
    if one == Fp8Block():
        assert isinstance(source, quantize.Fp8Block)
        assert torch.equal(source.codes.float(), codes.float())
        assert torch.equal(source.scale, scale)
    else:
        assert isinstance(source, torch.Tensor)
        assert source.dtype is torch.float32 and torch.equal(source, values)
    other = EncodedWeight(one, codes.clone(), scale.clone())
    assert encoded.equals(other)
    other.scale.view(-1)[0] *= 2  # type: ignore[union-attr]
    assert not encoded.equals(other)
    assert not encoded.equals(replace(encoded, codes=codes[:-1]))
    assert not encoded.equals(replace(other, scale=scale.double()))
    assert not encoded.equals(replace(other, scale=None))
    assert not replace(encoded, scale=None).equals(other)
    assert not encoded.equals(EncodedWeight(UNQUANTIZED, codes, scale))


@pytest.mark.parametrize("one", [W4AFp8(), Int4Group(32), Int8Channel(), Fp8Block(),
                                 NvFp4Packed(amax=5.0), NvFp4(amax=5.0), MxFp8()],
                         ids=lambda one: str(one.storage))  # fmt: skip
@pytest.mark.parametrize("rule", ["minmax", "mse"])
def test_rows_without_torch_have_the_same_bytes(one: WeightFormat, rule: str) -> None:
    weights = random(130, 256)
    results, error = one.quantize(weights, rule)
    converted = one.quantize_rows(Rows(weights.numpy()), rule)
    assert converted is not None
    for array, tensor in zip(converted.outputs, results, strict=True):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert array.reshape(-1).view("uint8").tolist() == raw.tolist()
    found, wanted = converted.error, error
    assert (found.elements, found.max_error) == (wanted.elements, wanted.max_error)
    assert found.signal_energy == pytest.approx(wanted.signal_energy, rel=1e-9)
    assert found.error_energy == pytest.approx(wanted.error_energy, rel=1e-9)
    with pytest.raises(AssertionError, match="is made by torch"):
        Fp8Channel().quantize_rows(Rows(weights.numpy()), rule)


def test_rows_of_a_weight_begin_at_a_row_of_scales() -> None:
    weights = random(300, 256)
    (codes, scale), _ = Fp8Block().quantize(weights, "minmax")

    class Source:
        def __init__(self) -> None:
            self.scale, self.others, self.whole_codes = scale, [scale], codes

        def codes(self, start: int, stop: int) -> torch.Tensor:
            return codes[start:stop]

    whole = EncodedWeight(Fp8Block(), codes, scale).dequantize()
    for start, stop in ((0, 300), (128, 300), (128, 129), (256, 300), (0, 128)):
        found = Fp8Block().encoded_rows(Source(), start, stop)
        assert found.scale is not None
        assert len(found.scale) == -(-stop // 128) - start // 128
        assert torch.equal(found.dequantize(), whole[start:stop])


def test_fp8_per_channel_is_made_row_by_row() -> None:
    weights = random(4, 64)
    weights[1] = 0.0
    weights[2, 5] = 900.0
    (codes, scale), error = Fp8Channel().quantize(weights, "minmax")
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    largest = weights.abs().amax(dim=1, keepdim=True) / 448
    largest[1] = 1.0
    assert torch.equal(scale, largest)
    assert float(codes[2, 5].float()) == 448.0 and not codes[1].float().any()
    values = codes.float() * scale
    assert error.max_error == float((weights - values).abs().max())
    assert torch.equal(EncodedWeight(Fp8Channel(), codes, scale).dequantize(), values)
    blocks = quantize.Fp8Block(*Fp8Block().quantize(weights, "minmax")[0])
    wide = quantize.dequantize_fp8_block(blocks, torch.float32)[0]
    for found, wanted in zip(
        Fp8Channel().quantize(blocks, "minmax")[0], Fp8Channel().quantize(wide, "minmax")[0],
        strict=True,
    ):  # fmt: skip
        assert torch.equal(found.float(), wanted.float())
    for bad in (torch.nan, torch.inf):
        weights[0, 0] = bad
        with pytest.raises(ValueError, match="^weights: expected finite numbers"):
            Fp8Channel().quantize(weights, "minmax")


def test_values_are_rounded_once_to_bf16() -> None:
    weights = random(6, 40)
    (values,), error = UNQUANTIZED.quantize(weights, "minmax")
    assert values.dtype is torch.bfloat16 and torch.equal(values, weights.bfloat16())
    lost = weights.double() - values.double()
    assert error.elements == 240
    assert error.signal_energy == pytest.approx(float(weights.double().square().sum()), rel=1e-12)
    assert error.error_energy == pytest.approx(float(lost.square().sum()), rel=1e-12)
    assert error.max_error == float(lost.abs().max())
    found = unquantized(values).statistics()
    assert (found.elements, found.high) == (240, float(values.max()))
    x = random(2, 40, seed=3).bfloat16()
    torch.testing.assert_close(unquantized(values).product(x), x @ values.t(), rtol=2e-2, atol=1e-1)
    converted = UNQUANTIZED.quantize_rows(
        Rows(*(part.view(kind).numpy() for part, kind in (
            (torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn), torch.uint8),
            (torch.tensor([[0.5]]), torch.float32),
        ))), "minmax",
    )  # fmt: skip
    assert converted is not None
    (bits,) = converted.outputs
    assert torch.from_numpy(bits.view("int16")).view(torch.bfloat16).tolist() == [[0.5, 1.0]]


def test_damaged_weights_have_no_statistics() -> None:
    """Of a format whose codes no kernel measures."""
    scale = torch.ones(2, 4)
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    good = EncodedWeight(NvFp4(), codes, scale)
    assert good.statistics().is_sound and good.statistics().elements == 128
    scale[1, 2] = math.inf
    assert not good.statistics().is_sound


def test_sixteen_numbers_of_nvfp4() -> None:
    codes = (torch.arange(0, 16, 2) | (torch.arange(1, 17, 2) << 4)).to(torch.uint8)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [*table, *(-value for value in table)]
    found = NvFp4().encoded((
        codes[None], torch.tensor([[2.0]]).to(torch.float8_e4m3fn), torch.tensor(0.25),
    ))  # fmt: skip
    assert found.shape == (1, 16)
    assert found.dequantize().tolist() == [[value / 2 for value in expected]]


def of_values(values: torch.Tensor) -> EncodedWeight:
    return unquantized(values)


def test_a_copy_in_another_dtype_is_an_exact_cast() -> None:
    """Either way round: float16 rounds what bfloat16 has below its range, bfloat16 the mantissa."""
    wide = torch.linspace(-2, 2, 1000).reshape(10, 100) * torch.logspace(-9, 0, 10)[:, None]
    halves = wide.to(torch.bfloat16).to(torch.float16)
    assert not halves.float().equal(wide.to(torch.bfloat16).float())
    for copy, original in (
        (wide.to(torch.bfloat16), halves),
        (halves, wide.to(torch.bfloat16)),
        (wide.to(torch.bfloat16), wide),
        (torch.full((2, 3), torch.nan), torch.full((2, 3), torch.nan, dtype=torch.float16)),
    ):
        rounding = Rounding()
        for ours, theirs in zip(copy.split(3), original.split(3), strict=True):
            rounding.add(of_values(ours), of_values(theirs))
        assert rounding.is_all
    other = wide.to(torch.bfloat16)
    other[3, 4] += 1
    rounding = Rounding()
    rounding.add(of_values(other), of_values(halves))
    assert (rounding.is_all, rounding.shown) == (False, "other values, 1 of them")
    assert rounding.expected == "the same values, cast from one dtype to the other"


def test_a_quantized_copy_is_near_in_every_row() -> None:
    """A row that is another's is seen, however many are right."""
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    codes, scale = Fp8Channel().encode(values, "amax")
    rounding = Rounding()
    for start in (0, 128):
        rows = slice(start, start + 128)
        copy = EncodedWeight(Fp8Channel(), codes[rows], scale[rows])
        rounding.add(copy, of_values(values[rows].to(torch.bfloat16)))
    assert rounding.is_all
    original = values.clone()
    original[7] = 0
    for replaced in (original, values.roll(1, dims=0)):
        rounding = Rounding()
        rounding.add(EncodedWeight(Fp8Channel(), codes, scale), of_values(replaced))
        assert not rounding.is_all
    assert rounding.expected.endswith("20 dB or more in every row")
    assert rounding.shown == "less in 256 of 256 rows"


def test_a_copy_of_four_bits_is_held_to_their_bound() -> None:
    """Blocks with one large value leave less than 20 dB; another row less than 12."""
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    values[:, ::32] = 6.0
    blocks = Q4().encode(values, "minmax")
    rounding = Rounding()
    rounding.add(Q4().encoded(blocks), of_values(values))
    assert rounding.is_all and rounding.expected.endswith("12 dB or more in every row")
    rounding = Rounding()
    rounding.add(Q4().encoded(blocks), of_values(values.roll(1, dims=0)))
    assert rounding.shown == "less in 64 of 64 rows"


@pytest.mark.parametrize(("hidden", "threads"), [(1023, 1), (1024, 3), (None, 3), (True, 3)])
def test_small_models_are_computed_by_one_thread(hidden: Any, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_threads_for(hidden):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("storage", WRITTEN)
def test_a_format_is_made_of_compiled_sources(storage: str) -> None:
    floats = {"bf16", "fp8_block"}
    compiled = {
        "bf16": {"fp8_block"},
        "fp8_block": {"bf16"},
        "fp8_channel": set(),
    }
    assert FORMATS[storage].of_options(FormatOptions()).compiled_sources == compiled.get(
        storage, floats
    )
