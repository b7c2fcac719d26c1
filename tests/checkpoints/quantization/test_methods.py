"""quantization_config as engines read it: the format of a linear by its name, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import Fp8Block, Int4Group, Int8Channel, W4AFp8
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.native import NATIVE_FP8, quantization_of

UP = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.1.mlp.experts.0.up_proj"
WIDE = Fp8Block(scale_dtypes=("F32", "BF16", "F16", "F8_E8M0"))
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
BY_CLASS = (*LINEAR_ROLES, Role.HEAD, Role.MTP_PROJECTION)
OTHERS = sorted(set(Role) - set(LINEAR_ROLES))


def compressed(**changes: Any) -> dict[str, Any]:
    """int8 by class; int4 for the up projections of layer 1, by name."""
    groups = {
        "a": {"targets": ["Linear"], "weights": INT8},
        "b": {"targets": ["re:.*layers.1.*up_proj", "model.head"], "weights": INT4},
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**config, "ignore": ["lm_head", "re:.*gate$"], "config_groups": groups, **changes}


@pytest.mark.parametrize("absent", [None, {}, ""])
@pytest.mark.parametrize("role", Role)
def test_without_quantization(absent: Any, role: Role) -> None:
    reading = quant_config_of(absent)
    assert reading.format_of(UP, role) is None
    assert reading.fused_format("x", Int8Channel()) == Int8Channel()


def test_native_fp8_is_that_of_every_linear_that_is_not_left_out() -> None:
    reading = quant_config_of(NATIVE_FP8 | {"ignored_layers": ["model.layers.2"]})
    for role in LINEAR_ROLES:
        assert reading.format_of(UP, role) == Fp8Block()
        assert reading.format_of("model.layers.2.mlp.up_proj", role) is None
    assert not [role for role in OTHERS if reading.format_of(UP, role) is not None]
    assert reading.fused_format("x", Fp8Block()) == Fp8Block()
    powers = quant_config_of(NATIVE_FP8 | {"scale_fmt": "ue8m0"})
    assert powers.format_of(UP, Role.DENSE_MLP) == WIDE


def test_w4afp8_is_that_of_experts_alone() -> None:
    reading = quant_config_of({"quant_method": "w4afp8", "ignored_layers": ["model.layers.2"]})
    for role in LINEAR_ROLES:
        expected = W4AFp8() if role is Role.ROUTED_EXPERT else WIDE
        assert reading.format_of(UP, role) == expected
        assert reading.format_of("model.layers.2.mlp.up_proj", role) is None
    assert not [role for role in OTHERS if reading.format_of(UP, role) is not None]
    assert reading.fused_format("x", WIDE) == WIDE


def test_groups_by_name_then_by_class() -> None:
    reading = quant_config_of(compressed())
    for role in Role:
        by_class = Int8Channel() if role in BY_CLASS else None
        assert reading.format_of("model.layers.2.mlp.up_proj", role) == by_class
        assert reading.format_of(UP, role) == (Int4Group(64) if role in BY_CLASS else None)
        assert reading.format_of("lm_head", role) is None
        assert reading.format_of("model.layers.1.gate", role) is None
    assert reading.format_of("model.head", Role.HEAD) == Int4Group(64)
    assert reading.format_of("model.head2", Role.HEAD) == Int8Channel()


def test_fused_linears_are_looked_up_by_their_own_names() -> None:
    reading = quant_config_of(compressed())
    for fused, found in (
        ("model.layers.1.mlp.gate_up_proj", Int4Group(64)),
        ("model.layers.2.mlp.gate_up_proj", Int8Channel()),
        ("model.layers.1.gate", None),
    ):
        assert reading.fused_format(fused, Int8Channel()) == found
    named = copy.deepcopy(compressed())
    del named["config_groups"]["a"]
    assert quant_config_of(named).fused_format("model.layers.2.x", Int4Group(32)) == Int4Group(32)
    assert quant_config_of(named).format_of("model.layers.2.x", Role.DENSE_MLP) is None


def test_sglang_s_native_fp8_beside_experts() -> None:
    reading = quant_config_of(compressed(linear_fp8_config=NATIVE_FP8, ignore=["re:.*layers.5.*"]))
    for role in LINEAR_ROLES:
        if role is not Role.ROUTED_EXPERT:
            assert reading.format_of("model.layers.5.mlp.up_proj", role) == WIDE
    assert reading.format_of("lm_head", Role.HEAD) is None
    assert reading.format_of(EXPERT, Role.ROUTED_EXPERT) == Int4Group(64)
    assert reading.format_of("model.layers.5.x", Role.ROUTED_EXPERT) is None
    assert reading.fused_format("model.layers.5.x", WIDE) == WIDE


def refusal(
    error: type[InvalidInputError | UnsupportedError], quantization: Any
) -> InvalidInputError | UnsupportedError:
    with pytest.raises(error) as caught:
        quant_config_of(quantization)
    return caught.value


def test_methods_that_are_not_read() -> None:
    for method in ("hqq", None, 5, ["fp8"], "x" * 200):
        error = refusal(UnsupportedError, {"quant_method": method})
        assert error.what.endswith("names a quantization method that this tool does not read")
        assert error.expected == (
            "quant_method fp8 or compressed-tensors or w4afp8 or awq or gptq or modelopt"
            " or auto-round or quark or bitsandbytes or mlx or gguf"
        )
        assert error.found == repr(method)[:100]
    assert refusal(InvalidInputError, ["fp8"]).found == "['fp8']"


@pytest.mark.parametrize("key", ["sparsity_config", "transform_config", "kv_cache_scheme"])
def test_fields_of_compressed_tensors_that_are_not_read(key: str) -> None:
    assert quant_config_of(compressed(**{key: {}}))
    value = {"a": "x" * 200}
    error = refusal(UnsupportedError, compressed(**{key: value}))
    assert f"quantization_config has a {key}, which" in error.what
    assert (error.expected, error.found) == ("none", repr(value)[:100])


def test_the_older_field_is_called_by_its_name() -> None:
    def error(**changes: Any) -> str:
        older = quantization_of({"compression_config": compressed(**changes)})
        with pytest.raises(MtpExportError) as caught:
            quant_config_of(older)
        return caught.value.what

    of_weights = {"group_0": {"targets": ["Linear"], "weights": 5}}
    of_targets = {"group_0": {"targets": 5, "weights": INT8}}
    ends = {
        "has a transform_config, which this tool does not read": {"transform_config": {"a": 1}},
        "ignore": {"ignore": 5},
        "config_groups": {"config_groups": {}},
        "config_groups.group_0": {"config_groups": {"group_0": 5}},
        "config_groups.group_0.targets": {"config_groups": of_targets},
        "config_groups.group_0.weights": {"config_groups": of_weights},
    }
    for words, changes in ends.items():
        assert "compression_config" in error(**changes) and error(**changes).endswith(words)


def test_caches_in_fp8_change_no_weight() -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    read = quant_config_of(compressed(kv_cache_scheme=cache))
    assert read == quant_config_of(compressed(kv_cache_scheme=None))


@pytest.mark.parametrize(
    ("changes", "key", "expected", "found"),
    [
        ({"config_groups": None}, "config_groups", "an object with one group or more", "None"),
        ({"config_groups": {}}, "config_groups", "an object with one group or more", "{}"),
        ({"config_groups": [1] * 99}, "config_groups", "an object with", repr([1] * 99)[:100]),
        ({"config_groups": {"g": 5}}, "config_groups.g", "an object", "5"),
        ({"config_groups": {"g": {}}}, "config_groups.g.weights", "an object", "None"),
        (
            {"config_groups": {"g": {"targets": "Linear", "weights": INT8}}},
            "config_groups.g.targets",
            "a list of module names and re: patterns",
            "'Linear'",
        ),
        (
            {"config_groups": {"g": {"targets": ["re:("], "weights": INT8}}},
            "config_groups.g.targets",
            "regular expressions after re:",
            "'re:(: missing ), unterminated subpattern at position 0'",
        ),
        ({"ignore": ["a", 5]}, "ignore", "a list of module names and re: patterns", "['a', 5]"),
        ({"ignore": ["re:*"]}, "ignore", "regular expressions", "'re:*: nothing to repeat"),
    ],
)
def test_what_makes_no_sense(changes: Any, key: str, expected: str, found: str) -> None:
    error = refusal(InvalidInputError, compressed(**changes))
    assert error.what == f"config.json has no usable quantization_config.{key}"
    assert str(error.expected).startswith(expected)
    assert str(error.found).startswith(found)
    assert len(str(error.found)) <= 100


def test_names_need_not_be_regular_expressions() -> None:
    reading = quant_config_of(compressed(ignore=["a(b", "re:c(d)?$"]))
    assert reading.format_of("a(b", Role.HEAD) is None
    assert reading.format_of("c", Role.HEAD) is None
    assert reading.format_of("cd", Role.HEAD) is None
    assert reading.format_of("re:c", Role.HEAD) == Int8Channel()
    assert quant_config_of(compressed(ignore=None)).format_of("lm_head", Role.HEAD) == Int8Channel()


def test_weights_that_are_not_read() -> None:
    group = {"targets": ["Linear"], "weights": INT4 | {"num_bits": 3}}
    error = refusal(UnsupportedError, compressed(config_groups={"g": group}))
    assert error.what.startswith("config_groups.g of config.json describes weights that this tool")
    assert error.expected == (
        "pack-quantized int4 in groups of 32, 64 or 128, pack-quantized int8 per channel,"
        " float-quantized fp8 per channel, float-quantized blocks of 128x128, mxfp4-pack-quantized,"
        " mxfp8-quantized, nvfp4-pack-quantized,"
        " nvfp4-pack-quantized with inputs in nvfp4,"
        " int-quantized int8 per channel, pack-quantized int4 with zero points, or pack-quantized"
        " int8 with zero points; without actorder group"
    )
    assert error.found == "format pack-quantized, int3, strategy group, group_size 64"
    group["weights"] |= {"symmetric": None}
    error = refusal(UnsupportedError, compressed(config_groups={"g": group}))
    assert error.found.startswith("format pack-quantized, int3 without symmetric true, strategy")
    group["weights"] |= {"symmetric": True}
    group["format"] = "dense"
    error = refusal(UnsupportedError, compressed(config_groups={"g": group}))
    assert error.found == "format dense, int3, strategy group, group_size 64"


def test_a_native_config_beside_groups_must_be_one() -> None:
    for changes in ({"quant_method": "x"}, {"weight_block_size": [1, 128]}):
        with pytest.raises(UnsupportedError, match="does not read"):
            quant_config_of(compressed(linear_fp8_config=NATIVE_FP8 | changes))
