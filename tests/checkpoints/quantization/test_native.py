"""quantization_config of released checkpoints: what is read, what is refused, what is written."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.quantization.native import (
    NATIVE_FP8,
    NativeFp8,
    describe,
    left_out,
    native_fp8,
    native_scheme,
    quantization_of,
    replaced_quantization,
    with_left_out,
    with_quantization,
    with_renamed_modules,
)

WIDE = ("F32", "BF16", "F16")
RELEASED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
KEYS = ("modules_to_not_convert", "ignored_layers")


def test_the_field_is_replaced_in_place_or_moved_to_the_end() -> None:
    config = {"a": 1, "quantization_config": {"x": 2}, "b": 3}
    assert quantization_of(config) == {"x": 2}
    assert quantization_of({"a": 1}) is None
    assert list(with_quantization(config, {"y": 4}).items()) == [
        ("a", 1), ("b", 3), ("quantization_config", {"y": 4}),
    ]  # fmt: skip
    assert with_quantization(config, None) == {"a": 1, "b": 3}
    assert list(replaced_quantization(config, {"y": 4}).items()) == [
        ("a", 1), ("quantization_config", {"y": 4}), ("b", 3),
    ]  # fmt: skip
    assert replaced_quantization({"a": 1}, None) == {"a": 1, "quantization_config": None}
    assert config == {"a": 1, "quantization_config": {"x": 2}, "b": 3}


def test_the_older_field_is_read_and_keeps_its_name() -> None:
    of_compressed = {"quant_method": "compressed-tensors"}
    config = {"compression_config": of_compressed, "a": 1}
    assert quantization_of(config) == of_compressed
    changed = of_compressed | {"ignore": ["b"]}
    assert replaced_quantization(config, changed) == {"compression_config": changed, "a": 1}
    assert with_quantization(config, changed) == {"a": 1, "compression_config": changed}
    assert with_quantization(config, RELEASED) == {"a": 1, "quantization_config": RELEASED}
    assert with_quantization(config, None) == {"a": 1}


@pytest.mark.parametrize("newer", [{"quant_method": "fp8"}, {}, ""])
def test_the_newer_field_decides_where_it_is_there(newer: object) -> None:
    config = {"quantization_config": newer, "compression_config": {"quant_method": "x"}}
    assert quantization_of(config) == newer
    assert quantization_of(config | {"quantization_config": None}) == {"quant_method": "x"}
    assert with_quantization(config, None) == {}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (None, "none"),
        ({}, "none"),
        (RELEASED, "fp8 e4m3 128×128"),
        (RELEASED | {"scale_fmt": "ue8m0"}, "fp8 e4m3 128×128 ue8m0"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"fmt": "e5m2", "weight_block_size": None}, "e5m2"),
        ({"quant_method": "compressed-tensors", "weight_block_size": 128}, "compressed-tensors"),
    ],
)
def test_in_words(quantization: Any, words: str) -> None:
    assert describe({"quantization_config": quantization}) == words


@pytest.mark.parametrize(
    ("quantization", "native"),
    [
        (None, None),
        ({}, None),
        ("", None),
        (NATIVE_FP8, NativeFp8(WIDE, ())),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, NativeFp8(WIDE, ())),
        (RELEASED | {"scale_fmt": "ue8m0"}, NativeFp8((*WIDE, "F8_E8M0"), ())),
        (RELEASED | {"scale_fmt": "float"}, NativeFp8(WIDE, ())),
        (RELEASED | {KEYS[0]: ["a"], KEYS[1]: ["b"]}, NativeFp8(WIDE, ("a", "b"))),
    ],
)
def test_native_fp8_is_read(quantization: Any, native: NativeFp8 | None) -> None:
    assert native_fp8(quantization) == native
    assert native_scheme(native) == ("bf16" if native is None else "a8w8_fp8")


def test_what_is_written_is_what_was_released() -> None:
    assert NATIVE_FP8 == RELEASED


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"quant_method": "awq"}, "quant_method awq, fmt e4m3, weight_block_size [128, 128]"),
        ({"fmt": "e5m2"}, "quant_method fp8, fmt e5m2, weight_block_size [128, 128]"),
        ({"weight_block_size": [64, 128]}, "quant_method fp8, fmt e4m3, weight_block_size [64, "),
        ({"weight_block_size": None}, "quant_method fp8, fmt e4m3, weight_block_size None"),
    ],
)
def test_any_other_quantization_is_unsupported(change: dict[str, Any], found: str) -> None:
    with pytest.raises(UnsupportedError, match="does not read") as refusal:
        native_fp8(RELEASED | change)
    assert str(refusal.value.found).startswith(found)
    assert "fmt e4m3 and weight_block_size [128, 128]" in str(refusal.value.expected)
    assert refusal.value.todo == "Start from the original checkpoint"


def test_what_a_config_does_not_say_is_not_found_in_it() -> None:
    for config, found in (
        ({"quant_method": "compressed-tensors"}, "quant_method compressed-tensors"),
        ({"bits": 4}, "a quantization_config without quant_method"),
    ):
        with pytest.raises(UnsupportedError) as refusal:
            native_fp8(config)
        assert refusal.value.found == found


def test_what_is_no_object_is_invalid() -> None:
    with pytest.raises(InvalidInputError, match="no usable quantization_config") as refusal:
        native_fp8([1] * 99)
    assert refusal.value.expected == "an object, or none"
    assert refusal.value.found == repr([1] * 99)[:100]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("listed", [5, "lm_head", ["a", 5], {"a": 1}])
def test_lists_that_are_none(key: str, listed: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"quantization_config\.{key}") as refusal:
        left_out({key: listed})
    assert refusal.value.expected == "a list of module names"
    assert refusal.value.found == repr(listed)
    with pytest.raises(InvalidInputError) as refusal:
        left_out({key: "x" * 200})
    assert refusal.value.found == repr("x" * 200)[:100]


@pytest.mark.parametrize(
    ("module", "covered"),
    [
        ("model.layers.1.mlp.down_proj", True),
        ("model.layers.3.self_attn.o_proj", False),  # the name itself
        ("model.layers.3.self_attn.o_proj_2", True),
        ("model.layers.2.mlp.experts.5.up_proj", False),  # below a name
        ("model.layers.2.mlp.experts_2", True),
        ("x.lm_head", False),  # the end of the name
        ("xlm_head", True),
    ],
)
def test_what_a_list_leaves_out(module: str, covered: bool) -> None:
    names = ("model.layers.3.self_attn.o_proj", "model.layers.2.mlp.experts", "lm_head")
    assert NativeFp8(WIDE, names).covers(module) is covered
    assert NativeFp8(WIDE, ()).covers(module)


def test_further_modules_are_listed_under_both_names() -> None:
    quantization = RELEASED | {KEYS[0]: ["a"]}
    found = with_left_out(quantization, ["b", "c"])
    assert found == RELEASED | {KEYS[0]: ["a", "b", "c"], KEYS[1]: ["b", "c"]}
    assert with_left_out(quantization, []) == quantization
    assert quantization == RELEASED | {KEYS[0]: ["a"]}


def test_listed_modules_are_renamed_or_taken_off() -> None:
    quantization = RELEASED | {KEYS[0]: ["a", "drop", "b"], KEYS[1]: []}
    config = {"x": 1, "quantization_config": quantization}
    found = with_renamed_modules(config, lambda name: None if name == "drop" else f"new.{name}")
    assert found == {"x": 1, "quantization_config": quantization | {KEYS[0]: ["new.a", "new.b"]}}
    for other in ({"x": 1}, {"x": 1, "quantization_config": None}):
        assert with_renamed_modules(other, lambda name: None) == other
