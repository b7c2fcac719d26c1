"""quantization_config in full, for pairs of schemes and for each dialect, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest

from cases import MTP_LAYER, TINY_CONFIG, UNQUANTIZED
from mtp_checkpoints.containers.base import QUANTIZATION
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import FormatOptions, Fp8Block, Int4Group, Int8Channel
from mtp_checkpoints.quantization.method import SGLANG, VLLM, Dialect
from mtp_checkpoints.quantization.native import NATIVE_FP8
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_export.schemes import SCHEMES
from mtp_export.schemes.configs import PartConfigs, quantization_configs
from mtp_export.schemes.conversion import Conversion

LAYER = f"model.layers.{MTP_LAYER}"
BUT_MTP = f"re:(?!{LAYER}.).*"
FP8_SOURCE, DENSE_SOURCE = stored_model(TINY_CONFIG), stored_model(UNQUANTIZED)
PATTERNS = FP8_SOURCE.family.patterns
ATTENTION, DENSE = PATTERNS.linears[Role.ATTENTION], PATTERNS.linears[Role.DENSE_MLP]
SHARED, ROUTED = PATTERNS.linears[Role.SHARED_EXPERT], PATTERNS.linears[Role.ROUTED_EXPERT]


def conversion(name: str, **changes: Any) -> Conversion:
    """A part in a scheme; fp8 under compressed-tensors' name for scales."""
    scheme, options = SCHEMES[name], FormatOptions(group_size=64, fp8_scale_name="weight_scale")
    fields = {"int4_activations_fp8": scheme.int4_activations_fp8, **changes}
    return Conversion(scheme=scheme.name, storages=scheme.storages, options=options, **fields)


def configs(
    main: str, mtp: str, dialect: Dialect, source: StoredModel = FP8_SOURCE, **changes: Any
) -> PartConfigs:
    return quantization_configs(
        source,
        main=conversion(main, native=source.native, **changes),
        mtp=conversion(mtp, native=source.native, **changes),
        dialect=dialect,
    )


def compressed(ignore: list[str], layout: str, *groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
    }


INT4 = Int4Group(64).group(activations_fp8=False)
INT4_FP8 = Int4Group(64).group(activations_fp8=True)
INT8 = Int8Channel().group(activations_fp8=False)
FP8 = Fp8Block().group(activations_fp8=False)


def test_integers_of_both_parts() -> None:
    """int4 has the class, for which one engine looks; the layer has patterns of its own."""
    plain = [f"re:.*{ATTENTION}", f"re:.*{DENSE}", f"{BUT_MTP}{SHARED}"]
    expected = compressed(
        [*PATTERNS.other_matrices, *plain],
        "pack-quantized",
        {"targets": ["Linear", f"{BUT_MTP}{ROUTED}"], **INT4},
        {"targets": [f"re:{LAYER}.{SHARED}", f"re:{LAYER}.{ROUTED}"], **INT8},
    )
    for dialect in (VLLM, SGLANG):
        found = configs("weight_only_int4", "weight_only_int8", dialect)
        assert found.main is not None
        groups = found.main["config_groups"].values()
        assert [sorted(group["targets"][1:]) for group in groups] == [
            sorted(group["targets"][1:]) for group in expected["config_groups"].values()
        ]
        assert sorted(found.main["ignore"]) == sorted(expected["ignore"])
        for group, wanted in zip(groups, expected["config_groups"].values(), strict=True):
            assert group["targets"][0] == wanted["targets"][0]
            assert {**group, "targets": None} == {**wanted, "targets": None}
        outer = {"ignore": None, "config_groups": None}
        assert {**found.main, **outer} == {**expected, **outer}
        assert found.mtp == found.main


def test_one_storage_has_the_class_alone() -> None:
    found = configs("weight_only_int8", "weight_only_int8", VLLM, DENSE_SOURCE)
    assert (
        found.main
        == found.mtp
        == compressed(
            [*PATTERNS.other_matrices, f"re:.*{ATTENTION}"],
            "pack-quantized",
            {"targets": ["Linear"], **INT8},
        )
    )


def test_integers_beside_fp8_as_vllm_reads_them() -> None:
    """fp8 has the class, and what attention absorbs is left out of it."""
    found = configs("a8w8_fp8_wint4", "a8w8_fp8", VLLM, bf16_modules=("kv_b_proj",))
    assert (
        found.main
        == found.mtp
        == compressed(
            [*PATTERNS.other_matrices, "re:.*kv_b_proj$"],
            "mixed-precision",
            {"targets": [f"{BUT_MTP}{ROUTED}"], **INT4_FP8},
            {"targets": ["Linear"], **FP8},
        )
    )


def test_integers_beside_fp8_as_sglang_reads_them() -> None:
    """fp8 stays native, beside the groups and in the layer's own config."""
    found = configs("a8w8_fp8_wint4", "a8w8_fp8", SGLANG)
    linear_fp8 = {key: value for key, value in NATIVE_FP8.items() if key != "fmt"}
    assert found.main == {
        **compressed(
            list(PATTERNS.other_matrices), "pack-quantized", {"targets": ["Linear"], **INT4_FP8}
        ),
        "linear_fp8_config": linear_fp8,
    }
    assert found.mtp == NATIVE_FP8
    other = configs("a8w8_fp8", "weight_only_int8", SGLANG)
    assert other.main == NATIVE_FP8
    assert other.mtp is not None and "linear_fp8_config" not in other.mtp
    assert [group["weights"]["type"] for group in other.mtp["config_groups"].values()] == ["int"]


def test_sglang_s_own_method() -> None:
    main = conversion("a8w8_fp8")
    w4afp8 = SCHEMES["a8w8_fp8_wint4"].variant("format", "w4afp8").storages
    own = Conversion(storages=w4afp8)
    found = quantization_configs(FP8_SOURCE, main=own, mtp=main, dialect=SGLANG)
    assert found == PartConfigs({"quant_method": "w4afp8"}, dict(NATIVE_FP8))


@pytest.mark.parametrize("dialect", [VLLM, SGLANG])
def test_without_integers_the_released_config_is_kept(dialect: Dialect) -> None:
    assert configs("a8w8_fp8", "a8w8_fp8", dialect) == PartConfigs(NATIVE_FP8, NATIVE_FP8)
    assert configs("a8w8_fp8", "a8w8_fp8", dialect, DENSE_SOURCE) == PartConfigs(
        NATIVE_FP8, NATIVE_FP8
    )
    assert configs("bf16", "bf16", dialect) == PartConfigs(None, None)
    listed = configs("bf16", "a8w8_fp8", dialect).main
    assert listed is not None
    names = listed["modules_to_not_convert"]
    assert names == listed["ignored_layers"] and len(names) == len(set(names))
    assert "model.layers.1.mlp.experts" in names and "model.layers.0.mlp.up_proj" in names
    assert not [name for name in names if name.startswith(LAYER) or ".experts." in name]


LEFT_OUT = ["model.layers.0.mlp.down_proj", "a", "b", "c"]


def left_out_source() -> StoredModel:
    return stored_model(TINY_CONFIG | {QUANTIZATION: NATIVE_FP8 | {"ignored_layers": LEFT_OUT}})


def test_what_a_release_left_out_stays_left_out() -> None:
    found = configs("weight_only_int8", "weight_only_int8", VLLM, left_out_source()).main
    assert found is not None
    assert found["ignore"][-4:] == [rf"re:(.*\.)?{name}(\..*)?$" for name in LEFT_OUT]


@pytest.mark.parametrize("option", ["--target sglang", "--format w4afp8"])
def test_what_cannot_be_left_out(option: str) -> None:
    w4afp8 = SCHEMES["a8w8_fp8_wint4"].variant("format", "w4afp8").storages
    main = conversion("a8w8_fp8_wint4")
    if option == "--format w4afp8":
        main = Conversion(storages=w4afp8)
    with pytest.raises(UnsupportedError) as caught:
        quantization_configs(
            left_out_source(), main=main, mtp=conversion("a8w8_fp8"), dialect=SGLANG
        )
    error = caught.value
    assert error.what == f"{option} cannot leave single linears in bf16, as this checkpoint does"
    assert error.expected == "an fp8 checkpoint without modules_to_not_convert"
    assert error.found == "model.layers.0.mlp.down_proj, a, b"
    assert error.todo == "Use --format compressed-tensors --target vllm"


@pytest.mark.parametrize(
    ("scheme", "algorithm", "has_inputs"),
    [("weight_only_nvfp4", "W4A16_NVFP4", False), ("a4w4_nvfp4", "NVFP4", True)],
)
@pytest.mark.parametrize("dialect", [VLLM, SGLANG])
def test_modelopt_lists_what_is_not_quantized(
    dialect: Dialect, scheme: str, algorithm: str, has_inputs: bool
) -> None:
    """Globs, of which no text is a part of a quantized linear's name."""
    main = SCHEMES[scheme].variant("format", "modelopt")
    found = quantization_configs(
        FP8_SOURCE,
        main=Conversion(scheme=scheme, storages=main.storages, bf16_modules=("kv_b_proj",)),
        mtp=conversion("bf16"),
        dialect=dialect,
    )
    numbers = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16}
    assert found.main == found.mtp
    assert found.main == {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers,
                "input_activations": numbers if has_inputs else None,
            }
        },
        "group_size": 16,
        "kv_cache_scheme": None,
        "ignore": [
            "model.embed_tokens",
            "lm_head",
            "model.layers.*.self_attn.kv_b_proj",
            "model.layers.*.mlp.gate",
            f"{LAYER}*",
        ],
    }


@pytest.mark.parametrize("mtp", ["weight_only_nvfp4", "a8w8_fp8", "weight_only_int8"])
def test_a_draft_beside_modelopt_is_unquantized(mtp: str) -> None:
    main = SCHEMES["a4w4_nvfp4"].variant("format", "modelopt")
    with pytest.raises(UnsupportedError, match="^The MTP layer beside a main") as refusal:
        quantization_configs(
            FP8_SOURCE,
            main=Conversion(scheme="a4w4_nvfp4", storages=main.storages),
            mtp=conversion(mtp),
            dialect=VLLM,
        )
    assert refusal.value.expected == "--mtp-quant bf16"
    assert SCHEMES[mtp].storages[Role.ROUTED_EXPERT] in str(refusal.value.found)


def test_nvfp4_of_both_parts_is_one_group() -> None:
    """It has the class alone; what attention absorbs is listed."""
    for scheme in ("weight_only_nvfp4", "a4w4_nvfp4"):
        found = configs(scheme, scheme, VLLM, bf16_modules=("kv_b_proj",))
        assert found.main is not None and found.main == found.mtp
        assert found.main["ignore"] == [*PATTERNS.other_matrices, "re:.*kv_b_proj$"]
        (group,) = found.main["config_groups"].values()
        assert group["targets"] == ["Linear"]
        assert group["format"] == found.main["format"] == "nvfp4-pack-quantized"
        assert (group["input_activations"] is None) == (scheme == "weight_only_nvfp4")
