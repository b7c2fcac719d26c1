"""Weight formats: tensors on disk, groups of a config, and the format that a group is read as."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from cases import WRITTEN
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.formats import (
    FORMATS,
    UNQUANTIZED,
    EncodedWeight,
    FormatOptions,
    Fp8Block,
    Int4Group,
    Int4ZeroPoints,
    Int8Channel,
    Int8ZeroPoints,
    MxFp4Packed,
    MxFp8,
    NvFp4Packed,
    NvFp4PackedA4,
    W4AFp8,
    WeightFormat,
    formats_described_by,
    mixes_groups_with_fp8,
    unquantized,
)
from mtp_checkpoints.formats.compressed import WeightsEntry

NAME = "model.layers.3.mlp.experts.7.up_proj.weight"
MODULE = NAME.removesuffix(".weight")
TENSORS: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "bf16": [(NAME, "BF16", (130, 384))],
    "fp8_block": [
        (NAME, "F8_E4M3", (130, 384)),
        (f"{MODULE}.weight_scale_inv", "F32", (2, 3)),
    ],
    "nvfp4_packed": [
        (f"{MODULE}.weight_packed", "U8", (130, 192)),
        (f"{MODULE}.weight_scale", "F8_E4M3", (130, 24)),
        (f"{MODULE}.weight_global_scale", "F32", (1,)),
    ],
    "mxfp4_packed": [
        (f"{MODULE}.weight_packed", "U8", (130, 192)),
        (f"{MODULE}.weight_scale", "U8", (130, 12)),
    ],
    "mxfp8": [
        (NAME, "F8_E4M3", (130, 384)),
        (f"{MODULE}.weight_scale", "U8", (130, 12)),
    ],
    "nvfp4_packed_a4": [
        (f"{MODULE}.weight_packed", "U8", (130, 192)),
        (f"{MODULE}.weight_scale", "F8_E4M3", (130, 24)),
        (f"{MODULE}.weight_global_scale", "F32", (1,)),
        (f"{MODULE}.input_global_scale", "F32", (1,)),
    ],
    "nvfp4": [
        (NAME, "U8", (130, 192)),
        (f"{MODULE}.weight_scale", "F8_E4M3", (130, 24)),
        (f"{MODULE}.weight_scale_2", "F32", ()),
        (f"{MODULE}.input_scale", "F32", ()),
    ],
    "nvfp4_a16": [
        (NAME, "U8", (130, 192)),
        (f"{MODULE}.weight_scale", "F8_E4M3", (130, 24)),
        (f"{MODULE}.weight_scale_2", "F32", ()),
    ],
    "fp8_channel": [
        (NAME, "F8_E4M3", (130, 384)),
        (f"{MODULE}.weight_scale", "F32", (130, 1)),
    ],
    "int8_channel": [
        (f"{MODULE}.weight_packed", "I32", (130, 96)),
        (f"{MODULE}.weight_scale", "BF16", (130, 1)),
        (f"{MODULE}.weight_shape", "I64", (2,)),
    ],
    "int4_group": [
        (f"{MODULE}.weight_packed", "I32", (130, 48)),
        (f"{MODULE}.weight_scale", "BF16", (130, 3)),
        (f"{MODULE}.weight_shape", "I64", (2,)),
    ],
    "w4afp8": [
        (NAME, "I8", (130, 192)),
        (f"{MODULE}.weight_scale_inv", "F32", (130, 3)),
        ("model.layers.3.mlp.experts.7.w3.input_scale", "F32", (1,)),
    ],
}
OPERATIONS = {
    "bf16": "dequantize_fp8_block",
    "fp8_block": "quantize_fp8_block",
    "fp8_channel": "quantize_fp8_channel",
    "mxfp4_packed": "quantize_mxfp4",
    "mxfp8": "quantize_mxfp8",
    **dict.fromkeys(("nvfp4_packed", "nvfp4_packed_a4", "nvfp4", "nvfp4_a16"), "quantize_nvfp4"),
    "int8_channel": "quantize_int8_channel",
    "int4_group": "quantize_int4_group",
    "w4afp8": "quantize_w4afp8",
}


@pytest.mark.parametrize("storage", WRITTEN)
def test_what_a_format_writes(storage: str) -> None:
    made = FORMATS[storage].of_options(FormatOptions())
    assert made.storage is storage
    assert made.operation_on(Fp8Block()) == OPERATIONS[storage]
    tensors = made.tensors(NAME, (130, 384))
    assert tensors == tuple(OutputTensor(*fields) for fields in TENSORS[storage])


def test_blocks_at_the_edges() -> None:
    for (rows, columns), blocks in {(128, 128): (1, 1), (129, 257): (2, 3), (1, 1): (1, 1)}.items():
        assert Fp8Block().tensors("a.weight", (rows, columns))[1].shape == blocks


def test_options_name_the_scale_and_the_group() -> None:
    options = FormatOptions(group_size=32, fp8_scale_name="weight_scale")
    scale = FORMATS["fp8_block"].of_options(options).tensors(NAME, (130, 384))[1]
    assert scale.name == f"{MODULE}.weight_scale"
    assert FORMATS["int4_group"].of_options(options).tensors(NAME, (130, 384))[1].shape == (130, 12)
    assert FormatOptions() == FormatOptions(128, "weight_scale_inv")


@pytest.mark.parametrize(
    ("one", "divisor", "unit", "elements", "rows"),
    [
        (UNQUANTIZED, 1, "", 1, 1),
        (Fp8Block(), 1, "", 1, 128),
        (Int8Channel(), 4, "the codes of a word", 4, 1),
        (Int4Group(64), 64, "the group size", 8, 1),
        (W4AFp8(), 128, "the group size", 2, 1),
        (NvFp4Packed(), 16, "the group size", 2, 1),
        (MxFp4Packed(), 32, "the group size", 2, 1),
        (MxFp8(), 32, "the group size", 1, 1),
    ],
)
def test_what_k_must_be_divisible_by(
    one: WeightFormat, divisor: int, unit: str, elements: int, rows: int
) -> None:
    assert (one.k_divisor, one.k_unit) == (divisor, unit)
    assert (one.elements_per_code, one.scale_rows) == (elements, rows)


def test_dtypes_that_are_read() -> None:
    codes, scale = Fp8Block().tensors(NAME, (1, 1))
    for one, dtypes in (
        (Fp8Block(), ("F32", "BF16", "F16")),
        (Fp8Block("s", ("F32", "F8_E8M0")), ("F32", "F8_E8M0")),
    ):
        assert one.accepted_dtypes(codes) == ("F8_E4M3",)
        assert one.accepted_dtypes(scale) == dtypes
    assert Int8Channel().accepted_dtypes(OutputTensor("x", "I32", ())) == ("I32",)


INT8: dict[str, Any] = {
    "weights": {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
        "group_size": None,
        "actorder": None,
    },
    "input_activations": None,
    "output_activations": None,
    "format": "pack-quantized",
}
INT4: dict[str, Any] = INT8 | {
    "weights": INT8["weights"] | {"num_bits": 4, "strategy": "group", "group_size": 64}
}
FP8: dict[str, Any] = {
    "weights": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "block",
        "dynamic": False,
        "block_structure": [128, 128],
    },
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "dynamic": True,
        "group_size": 128,
    },
    "output_activations": None,
    "format": "float-quantized",
}
TOKENS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
NVFP4: dict[str, Any] = INT8 | {
    "weights": {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "dynamic": False,
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
    "format": "nvfp4-pack-quantized",
}
NVFP4_A4 = NVFP4 | {"input_activations": NVFP4["weights"] | {"dynamic": "local"}}
MXFP4 = INT8 | {
    "weights": NVFP4["weights"]
    | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "format": "mxfp4-pack-quantized",
}
MXFP8 = INT8 | {
    "weights": MXFP4["weights"] | {"num_bits": 8},
    "input_activations": MXFP4["weights"] | {"num_bits": 8, "dynamic": True},
    "format": "mxfp8-quantized",
}
GROUPS: list[tuple[WeightFormat, dict[str, Any], WeightFormat]] = [
    (Int8Channel(), INT8, Int8Channel()),
    (Int4Group(64), INT4, Int4Group(64)),
    (Fp8Block(), FP8, Fp8Block("weight_scale", ("F32", "BF16", "F16", "F8_E8M0"))),
    (NvFp4Packed(), NVFP4, NvFp4Packed()),
    (NvFp4PackedA4(), NVFP4_A4, NvFp4PackedA4()),
    (MxFp4Packed(), MXFP4, MxFp4Packed()),
    (MxFp8(), MXFP8, MxFp8()),
]


def read(group: dict[str, Any], layout: str | None = None) -> WeightFormat | None:
    """The format that a group of a config describes."""
    entry = WeightsEntry.of(group, layout)
    found = (
        []
        if entry is None
        else [one.of_entry(entry) for one in formats_described_by("compressed-tensors")]
    )
    formats = [one for one in found if one is not None]
    assert len(formats) <= 1, "no group describes two formats"
    return formats[0] if formats else None


@pytest.mark.parametrize(("written", "group", "again"), GROUPS)
def test_a_group_is_read_as_it_was_written(
    written: WeightFormat, group: dict[str, Any], again: WeightFormat
) -> None:
    assert written.group(activations_fp8=False) == group
    assert read(group) == again
    unnamed = {key: value for key, value in group.items() if key != "format"}
    assert read(unnamed, group["format"]) == again
    assert read(unnamed | {"format": None}, group["format"]) == again
    assert read(group, "another") == again, "a group's own layout comes first"
    assert read(unnamed, "another") is None


def test_int4_may_run_with_activations_in_fp8() -> None:
    assert Int4Group(64).group(activations_fp8=True) == INT4 | {"input_activations": TOKENS}
    assert Int8Channel().group(activations_fp8=True) == INT8
    with pytest.raises(AssertionError, match="no w4afp8"):
        W4AFp8().group(activations_fp8=True)


@pytest.mark.parametrize("group", [INT8, INT4, FP8, NVFP4, NVFP4_A4, MXFP4, MXFP8])
@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 3},
        {"type": "uint"},
        {"strategy": "tensor"},
        {"symmetric": None},
        {"symmetric": 1},
        {"dynamic": True},
        {"actorder": "group"},
        {"actorder": "dynamic"},
    ],
)
def test_other_weights_are_no_known_format(group: dict[str, Any], change: dict[str, Any]) -> None:
    changed = copy.deepcopy(group)
    changed["weights"] |= change
    assert read(changed) is None


def test_integers_with_zero_points() -> None:
    """Floats have none, and groups may have any size that words hold."""

    def asymmetric(group: dict[str, Any], **weights: object) -> dict[str, Any]:
        return group | {"weights": group["weights"] | {"symmetric": False, **weights}}

    assert read(asymmetric(INT4, group_size=16)) == Int4ZeroPoints(16)
    assert read(asymmetric(INT4, strategy="channel", group_size=None)) == Int4ZeroPoints(-1)
    assert read(asymmetric(INT8)) == Int8ZeroPoints(-1)
    assert read(asymmetric(INT8, strategy="group", group_size=12)) == Int8ZeroPoints(12)
    for size in (12, 0, -8, None, 0.5):
        assert read(asymmetric(INT4, group_size=size)) is None
    assert read(asymmetric(FP8)) is None


def test_group_sizes_and_blocks_that_are_read() -> None:
    for size in (32, 64, 128):
        sized = INT4 | {"weights": INT4["weights"] | {"group_size": size}}
        assert read(sized) == Int4Group(size)
    for size in (16, 256, None):
        assert read(INT4 | {"weights": INT4["weights"] | {"group_size": size}}) is None
    for size in (32, 8, None):
        assert read(NVFP4 | {"weights": NVFP4["weights"] | {"group_size": size}}) is None
    for block in ([64, 128], [128], None, "128x128"):
        assert read(FP8 | {"weights": FP8["weights"] | {"block_structure": block}}) is None
    assert read(INT8 | {"weights": INT8["weights"] | {"group_size": 128}}) == Int8Channel()


def test_formats_of_a_config_in_words() -> None:
    assert [one.in_words for one in formats_described_by("compressed-tensors")] == [
        "pack-quantized int4 in groups of 32, 64 or 128",
        "pack-quantized int8 per channel",
        "float-quantized fp8 per channel",
        "float-quantized blocks of 128x128",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "nvfp4-pack-quantized",
        "nvfp4-pack-quantized with inputs in nvfp4",
        "int-quantized int8 per channel",
        "pack-quantized int4 with zero points",
        "pack-quantized int8 with zero points",
    ]


def test_constants_that_contradict_the_weight() -> None:
    good, bad = torch.tensor([3, 8]), torch.tensor([8, 3])
    Int8Channel().check_constants({"a.weight_shape": good}, (3, 8))
    with pytest.raises(InvalidInputError, match=r"a\.weight_shape contradicts") as refusal:
        Int8Channel().check_constants({"a.weight_shape": bad}, (3, 8))
    assert (refusal.value.expected, refusal.value.found) == ([3, 8], [8, 3])
    (shape,) = Int4Group(32).constants((3, 64))
    assert (shape.tolist(), shape.dtype) == ([3, 64], np.int64)
    (scale,) = W4AFp8().constants((3, 128))
    assert (scale.tolist(), scale.dtype) == ([1.0], np.float32)
    W4AFp8().check_constants({"x": torch.tensor([1e-30])}, (3, 128))
    for value in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(InvalidInputError, match="Tensor x is no scale") as refusal:
            W4AFp8().check_constants({"x": torch.tensor([value])}, (3, 128))
        assert refusal.value.expected == "a finite number above 0"
        assert str(refusal.value.found) == str([value])
    assert UNQUANTIZED.constants((1, 2)) == ()
    UNQUANTIZED.check_constants({}, (1, 2))
    with pytest.raises(AssertionError, match="has no constants"):
        UNQUANTIZED.check_constants({"x": good}, (3, 8))


@pytest.mark.parametrize("storage", sorted({*WRITTEN} - {"bf16", "fp8_block"}))
def test_a_weight_that_was_encoded(storage: str) -> None:
    weights = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    made = FORMATS[storage].of_options(FormatOptions())
    tensors, error = made.quantize(weights, "minmax")
    encoded = made.encoded(tensors)
    assert (encoded.storage, encoded.shape) == (storage, (6, 256))
    found = encoded.dequantize()
    assert found.dtype == torch.float32
    assert float((weights - found).abs().max()) == pytest.approx(error.max_error)
    assert error.max_error < (0.5 if "fp4" in storage else 0.3)  # 4 and 6 are neighbours
    assert encoded.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_the_scale_rule_is_that_asked_for() -> None:
    weights = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for made in (Int4Group(64), W4AFp8(), NvFp4Packed()):
        errors = [made.quantize(weights, rule)[1].error_energy for rule in ("minmax", "mse")]
        assert errors[1] < errors[0]


def test_fp8_blocks_are_encoded() -> None:
    weights = torch.randn(130, 140, generator=torch.Generator().manual_seed(0))
    (codes, scale), error = Fp8Block().quantize(weights, "minmax")
    assert (codes.dtype, scale.shape) == (torch.float8_e4m3fn, (2, 2))
    found = EncodedWeight(Fp8Block(), codes, scale).dequantize()
    assert float((weights - found).abs().max()) == pytest.approx(error.max_error)


def test_values_themselves() -> None:
    values = torch.tensor([1.5, 2.0], dtype=torch.bfloat16)
    one = unquantized(values)
    assert (one.storage, one.shape, one.scale) == ("bf16", (2,), None)
    assert (one.dequantize().dtype, one.dequantize().tolist()) == (torch.float32, [1.5, 2.0])
    assert one.dequantize(torch.float16).dtype == torch.float16
    with pytest.raises(AssertionError, match="no scales"):
        UNQUANTIZED.decode(values, values, torch.float32)


def test_storages_that_two_ways_of_describing_meet() -> None:
    for storages, mixed in (
        ({"fp8_block"}, False),
        ({"int4_group", "int8_channel"}, False),
        ({"fp8_block", "int4_group"}, True),
        ({"fp8_block", "int8_channel", "bf16"}, True),
        ({"fp8_block", "w4afp8"}, False),
        (set(), False),
    ):
        assert mixes_groups_with_fp8(storages) is mixed
