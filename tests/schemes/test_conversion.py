"""Conversion of one part: the storage of a weight, and the step that writes each of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role, TensorSpec
from mtp_checkpoints.formats import (
    FORMATS,
    UNQUANTIZED,
    FormatOptions,
    Fp8Block,
    Int4Group,
    NvFp4Packed,
    WeightFormat,
)
from mtp_checkpoints.quantization.mismatches import StoredTensor
from mtp_checkpoints.quantization.native import NativeFp8
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_export.plan import COPY, Step, copy_step
from mtp_export.schemes.conversion import (
    AS_STORED,
    DEQUANTIZED,
    Conversion,
    transpose_step,
)
from mtp_export.schemes.scheme import every_linear
from mtp_export.schemes.transforms import Convert, Transpose

NAME = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{NAME}_scale_inv"
FILE = LocalFolder(Path()).file("shard")


def spec_of(role: Role = Role.DENSE_MLP, name: str = NAME, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape or (256, 256), ("BF16",), role)


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, DType[dtype], shape, FILE, 8, 0)


def stored(*tensors: TensorInfo, role: Role = Role.DENSE_MLP) -> StoredWeight:
    """A weight as it lies on disk: values, or fp8 codes and their scale."""
    made: WeightFormat = Fp8Block() if len(tensors) == 2 else UNQUANTIZED
    promised = tuple(StoredTensor(one.name, one.shape, (one.dtype,)) for one in tensors)
    return StoredWeight(spec_of(role, tensors[0].name, *tensors[0].shape), made, promised)


CODES, BLOCKS = info(NAME, "F8_E4M3", 256, 256), info(SCALE, "F32", 2, 2)
VALUES = info(NAME, "BF16", 256, 256)
SOURCE = {NAME: CODES, SCALE: BLOCKS}


def conversion(storage: str, **more: Any) -> Conversion:
    return Conversion(scheme="scheme", storages=every_linear(storage), **more)


@pytest.mark.parametrize("role", Role)
def test_linears_have_the_storage_of_their_role(role: Role) -> None:
    storages = every_linear("bf16") | {Role.DENSE_MLP: "int8_channel"}
    own = Conversion(scheme="x", storages=storages)
    expected = "int8_channel" if role is Role.DENSE_MLP else "bf16"
    assert own.storage_of(spec_of(role)) is (expected if role in LINEAR_ROLES else None)
    assert own.storage_of(spec_of(role, NAME, 256)) is None, "a vector is no linear"
    assert AS_STORED.storage_of(spec_of(role)) is None
    assert DEQUANTIZED.storage_of(spec_of(role)) is ("bf16" if role in LINEAR_ROLES else None)


def test_what_a_release_left_out_stays() -> None:
    native = NativeFp8(("F32",), ("model.layers.1.mlp",))
    for storage in ("fp8_block", "int8_channel"):
        assert conversion(storage, native=native).storage_of(spec_of()) is None
        other = spec_of(Role.DENSE_MLP, "model.layers.2.mlp.up_proj.weight")
        assert conversion(storage, native=native).storage_of(other) is storage


def test_linears_that_attention_absorbs_are_bf16_whatever_others_are() -> None:
    absorbed = spec_of(Role.ATTENTION, "model.layers.1.self_attn.kv_b_proj.weight")
    for storage in ("fp8_block", "int4_group", "nvfp4_packed"):
        own = conversion(storage, bf16_modules=("kv_b_proj",))
        assert own.storage_of(spec_of()) is storage
        assert own.storage_of(absorbed) == "bf16"


def copied(source: TensorInfo, name: str) -> Step:
    output = OutputTensor(name, source.dtype, source.shape)
    return Step(COPY, (source.name,), (output,), None)


@pytest.mark.parametrize(
    ("own", "source", "expected"),
    [
        (AS_STORED, CODES, copied(CODES, "new")),
        (AS_STORED, VALUES, copied(VALUES, "new")),
        (conversion("fp8_block"), CODES, copied(CODES, "new")),
        (conversion("bf16"), VALUES, copied(VALUES, "new")),
        (conversion("bf16"), info(NAME, "F32", 256, 256), None),
    ],
)
def test_what_is_stored_so_already_is_copied(
    own: Conversion, source: TensorInfo, expected: Step | None
) -> None:
    if expected is None:  # in whatever dtype the model computes
        expected = copied(source, "new")
    tensors = [source, *([BLOCKS] if source is CODES else [])]
    found = own.step(stored(*tensors), source, {one.name: one for one in tensors}, name="new")
    assert found == expected


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (AS_STORED, "new.weight_scale_inv"),
        (conversion("fp8_block"), "new.weight_scale_inv"),
        (
            conversion("fp8_block", options=FormatOptions(fp8_scale_name="weight_scale")),
            "new.weight_scale",
        ),
        (conversion("bf16"), None),
        (conversion("int8_channel"), None),
    ],
)
def test_a_scale_is_kept_with_its_codes(own: Conversion, expected: str | None) -> None:
    found = own.step(stored(CODES, BLOCKS), BLOCKS, SOURCE, name="new.weight_scale_inv")
    assert found == (None if expected is None else copied(BLOCKS, expected))


@pytest.mark.parametrize("storage", ["bf16", "int8_channel", "int4_group"])
def test_codes_are_converted_with_their_scales(storage: str) -> None:
    own = conversion(storage, options=FormatOptions(group_size=32), scale_rule="mse")
    made = FORMATS[storage].of_options(own.options)
    found = own.step(stored(CODES, BLOCKS), CODES, SOURCE, name="new.weight")
    outputs = made.tensors("new.weight", (256, 256))
    convert = Convert(made, "mse", Fp8Block())
    assert found == Step(convert, (NAME, SCALE), outputs, scheme="scheme")
    if storage == "int4_group":
        assert made == Int4Group(32)


def test_a_number_of_the_matrix_is_measured_over_all_that_engines_join() -> None:
    """By the names of the release, fp8 codes with their scales, whatever the target's name is."""
    own = conversion("nvfp4_packed", joined=(("q_proj", "k_proj"), ("gate_proj", "up_proj")))
    gate, gate_scale = (name.replace("up_proj", "gate_proj") for name in (NAME, SCALE))
    others = {gate: CODES, gate_scale: BLOCKS, "model.layers.2.mlp.gate_proj.weight": CODES}
    outputs = NvFp4Packed().tensors("new.weight", (256, 256))
    for more, inputs, joined in (
        (others, (NAME, SCALE, gate, gate_scale), 1),
        ({}, (NAME, SCALE), 0),
    ):
        found = own.step(stored(CODES, BLOCKS), CODES, SOURCE | more, name="new.weight")
        convert = Convert(NvFp4Packed(), "minmax", Fp8Block(), joined=joined)
        assert found == Step(convert, inputs, outputs, scheme="scheme")
        assert convert.own(inputs) == (NAME, SCALE)
    other = conversion("int4_group", joined=own.joined)
    found = other.step(stored(CODES, BLOCKS), CODES, SOURCE | others, name="new.weight")
    assert found is not None and found.inputs == (NAME, SCALE)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_are_converted_alone(dtype: str) -> None:
    own, source = conversion("fp8_block"), info(NAME, dtype, 256, 256)
    found = own.step(stored(source), source, {NAME: source}, name=NAME)
    outputs = Fp8Block().tensors(NAME, (256, 256))
    assert found == Step(Convert(Fp8Block(), "minmax"), (NAME,), outputs, scheme="scheme")


def test_what_cannot_be_converted() -> None:
    own = conversion("int4_group")
    double = info(NAME, "F64", 256, 256)
    with pytest.raises(UnsupportedError, match="cannot become int4_group") as refusal:
        own.step(stored(double), double, {NAME: double}, name=NAME)
    error = refusal.value
    assert (error.where, error.found) == (Path("shard"), "F64")
    assert error.expected == "dtype F8_E4M3 or BF16 or F16 or F32"
    assert error.todo == "Start from the original release"
    ragged = info(NAME, "BF16", 128, 192)
    with pytest.raises(UnsupportedError, match=f"Tensor {NAME} cannot become") as refusal:
        own.step(stored(ragged), ragged, {NAME: ragged}, name=NAME)
    error = refusal.value
    assert (error.where, error.found) == (Path("shard"), "[N, K] = [128, 192]")
    assert error.expected == "K divisible by 128, the group size"
    assert "--group-size" in str(error.todo)
    assert own.step(stored(double, role=Role.HEAD), double, {NAME: double}, name=NAME) is not None


def test_steps_of_any_tensor() -> None:
    assert copy_step(CODES, "new") == copied(CODES, "new")
    turned = Step(Transpose(), (SCALE,), (OutputTensor("new", DType.F32, (3, 2)),), None)
    assert transpose_step(info(SCALE, "F32", 2, 3), "new") == turned
