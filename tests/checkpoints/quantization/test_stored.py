"""Stored models: config.json alone gives the tensors on disk, as the engines read it, for every row
of the precision table and every target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cases import (
    MTP_LAYER,
    SAFETENSORS_TARGETS,
    export,
    make_checkpoint,
    quantize,
    read_json,
    read_tensors,
)
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.formats import W4AFp8
from mtp_checkpoints.layouts import TARGETS, target_of
from mtp_checkpoints.quantization.mismatches import StoredTensor, compare
from mtp_checkpoints.quantization.native import QUANTIZATION
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from quantize_rows import BF16, CONFIGS, NATIVE, ROWS, Part, linears, pair
from quantized_by_others import METHODS

STORAGE = {
    "bf16": "bf16",
    "fp8": "fp8_block",
    "fp8 of compressed-tensors": "fp8_block",
    "int8": "int8_channel",
    "int4": "int4_group",
    "w4afp8": "w4afp8",
    "nvfp4": "nvfp4_packed",
    "nvfp4 under nvfp4": "nvfp4_packed_a4",
    "nvfp4 of modelopt": "nvfp4_a16",
    "nvfp4 under nvfp4 of modelopt": "nvfp4",
    "mxfp4": "mxfp4_packed",
    "mxfp8": "mxfp8",
}
# SGLang's names: make_expert_input_scale_params_mapping in fused_moe_triton/layer.py gives w1 and
# w3 to w13 and w2 to w2; make_expert_params_mapping has w1 for gate, w2 for down, w3 for up.
SGLANG_INPUT_SCALE = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
LAYER = f"model.layers.{MTP_LAYER}"
FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"


def check_folder(folder: Path, stored: StoredModel, part: Part, source: Path) -> None:
    """Check that a folder holds what its config promises, in the storages of the table."""
    on_disk = Checkpoint.open(folder).tensors
    assert compare(on_disk, stored.tensors.values()) == []
    assert {n for n, t in stored.tensors.items() if not t.optional} <= on_disk.keys()
    modules = [m for m in linears(read_tensors(source)) if f"{m}.weight" in stored.weights]
    assert modules
    for module in modules:
        one = stored.weights[f"{module}.weight"]
        assert one.storage is STORAGE[part.form_of(module)], module
        assert all(stored.weight_of[tensor.name] is one for tensor in one.tensors)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", ROWS)
def test_every_row(
    name: str, kind: str, row_sources: dict[str, Path], row_bundle: Callable[[str, str], Path]
) -> None:
    row, bundle, source = ROWS[name], row_bundle(name, kind), row_sources[kind]
    main, mtp = (read_json(bundle / part / "config.json") for part in ("main", "mtp"))
    check_folder(bundle / "main", stored_model(main).main, row.main, source)
    check_folder(bundle / "mtp", stored_model(mtp).mtp, row.mtp, source)
    draft = target_of("hf").stored_draft(mtp)
    assert draft.tensors == stored_model(mtp).mtp.tensors
    if mtp.get("quantization_config") == main.get("quantization_config"):  # vLLM reads the main's
        assert stored_model(main).mtp.tensors == stored_model(mtp).mtp.tensors


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("target", SAFETENSORS_TARGETS)
@pytest.mark.parametrize("shared", ["keep", "drop"])
def test_every_target(
    target: str, kind: str, shared: str, row_sources: dict[str, Path], output: Path
) -> None:
    options = ("--target", target, "--shared-weights", shared)
    if shared == "drop" and TARGETS[target].needs_shared_weights:
        return
    assert export(row_sources[kind], output, *options).code == 0
    config = read_json(output / "mtp/config.json")
    part = NATIVE if kind == "fp8" and target != "xllm" else BF16
    stored = target_of(target).stored_draft(config, MTP_LAYER)
    check_folder(output / "mtp", stored, part, row_sources[kind])
    main = stored_model(read_json(output / "main/config.json"))
    assert stored.weights.keys() == main.mtp.weights.keys()


@pytest.mark.parametrize("left_out", ["self_attn.o_proj", "mlp.shared_experts"])
@pytest.mark.parametrize("target", SAFETENSORS_TARGETS)
def test_what_is_left_out_of_fp8_is_so_under_the_target_s_names(
    target: str, left_out: str, tmp_path: Path, output: Path
) -> None:
    module = f"{LAYER}.{left_out}"
    fp8 = CONFIGS["fp8"]["quantization_config"] | {"ignored_layers": [module]}
    config = CONFIGS["fp8"] | {"quantization_config": fp8}
    source = make_checkpoint(tmp_path / "source", config)
    assert export(source, output, "--target", target).code == 0
    stored = target_of(target).stored_draft(read_json(output / "mtp/config.json"), MTP_LAYER)
    assert compare(Checkpoint.open(output / "mtp").tensors, stored.tensors.values()) == []
    native = [n for n, one in stored.weights.items() if one.storage == "fp8_block"]
    assert bool(native) is (target != "xllm")
    assert not [name for name in native if name.startswith(module)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_source_holds_the_tensors_of_its_family(kind: str) -> None:
    """Linears in fp8 have one more: a scale per 128x128 block beside it."""
    expected = []
    for spec in family_of(CONFIGS[kind]).tensors.values():
        in_fp8 = kind == "fp8" and spec.is_linear_weight
        dtypes = ("F8_E4M3",) if in_fp8 else spec.dtypes
        expected.append(StoredTensor(spec.name, spec.shape, dtypes, optional=spec.optional))
        if in_fp8:
            blocks = (-(-spec.shape[0] // 128), -(-spec.shape[1] // 128))
            scale = f"{spec.name}_scale_inv"
            wide = ("F32", "BF16", "F16")
            expected.append(StoredTensor(scale, blocks, wide, scale_of=spec.name))
    assert list(stored_model(CONFIGS[kind]).tensors.values()) == expected


@pytest.mark.parametrize("projection", SGLANG_INPUT_SCALE)
def test_input_scales_have_sglang_s_names(projection: str) -> None:
    expert = "model.layers.3.mlp.experts.7"
    names = [
        tensor.name for tensor in W4AFp8().tensors(f"{expert}.{projection}.weight", (128, 256))
    ]
    assert names == [
        f"{expert}.{projection}.weight",
        f"{expert}.{projection}.weight_scale_inv",
        f"{expert}.{SGLANG_INPUT_SCALE[projection]}.input_scale",
    ]
    config = CONFIGS["fp8"] | {"quantization_config": {"quant_method": "w4afp8"}}
    name = f"model.layers.1.mlp.experts.1.{projection}.weight"
    *_, scale = stored_model(config).weights[name].tensors
    assert scale.name.endswith(f"experts.1.{SGLANG_INPUT_SCALE[projection]}.input_scale")


def compressed(bits: int, **changes: Any) -> dict[str, Any]:
    """A config whose every linear is int8, or int4 in groups of 32."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": 32}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*eh_proj$", "re:.*shared_head.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return CONFIGS["bf16"] | {"quantization_config": quantization | changes}


def storage(config: dict[str, Any], module: str) -> str:
    return stored_model(config).weights[f"{module}.weight"].storage


def test_names_come_before_the_class_and_ignoring_before_both() -> None:
    config = compressed(8)
    groups = config["quantization_config"]["config_groups"]
    int4 = copy.deepcopy(compressed(4)["quantization_config"]["config_groups"]["group_0"])
    groups["group_1"] = int4 | {"targets": ["re:.*mlp.experts.*", "model.layers.0.mlp.down_proj"]}
    assert storage(config, "model.layers.1.mlp.experts.2.up_proj") == "int4_group"
    assert storage(config, "model.layers.0.mlp.down_proj") == "int4_group"
    assert storage(config, "model.layers.1.self_attn.o_proj") == "int8_channel"
    config["quantization_config"]["ignore"] += ["re:.*experts.*", "model.layers.1.self_attn.o_proj"]
    assert storage(config, "model.layers.1.mlp.experts.2.up_proj") == "bf16"
    assert storage(config, "model.layers.1.self_attn.o_proj") == "bf16"
    assert storage(config, "model.layers.2.self_attn.o_proj") == "int8_channel"


def test_a_pattern_is_matched_from_the_start_and_a_name_as_a_whole() -> None:
    config = compressed(8, ignore=["re:mlp.*", "o_proj", "re:model.layers.1.self_attn.o"])
    assert storage(config, "model.layers.0.mlp.down_proj") == "int8_channel"
    assert storage(config, "model.layers.0.self_attn.o_proj") == "int8_channel"
    assert storage(config, "model.layers.1.self_attn.o_proj") == "bf16"


def test_linears_that_are_not_ignored_are_taken_for_quantized() -> None:
    config = compressed(8, ignore=[])
    for module in ("lm_head", f"{LAYER}.eh_proj", f"{LAYER}.shared_head.head"):
        assert storage(config, module) == "int8_channel"
    for module in ("model.embed_tokens", "model.norm", "model.layers.1.mlp.gate"):
        assert storage(config, module) == "bf16"
    assert "lm_head.weight_packed" in stored_model(config).tensors


def test_all_experts_of_a_layer_are_what_the_first_is() -> None:
    config = compressed(8, ignore=["re:model.layers.1.mlp.experts.0.*"])
    assert storage(config, "model.layers.1.mlp.experts.3.up_proj") == "bf16"
    assert storage(config, "model.layers.2.mlp.experts.3.up_proj") == "int8_channel"
    config = compressed(8, ignore=["re:model.layers.1.mlp.experts.3.*"])
    assert storage(config, "model.layers.1.mlp.experts.3.up_proj") == "int8_channel"


def second_group(config: dict[str, Any], *targets: str) -> None:
    other = compressed(4)["quantization_config"]["config_groups"]["group_0"]
    config["quantization_config"]["config_groups"]["group_1"] = other | {"targets": list(targets)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["quantization_config"]["ignore"].append("re:.*gate_proj$"), "up_proj"),
        (lambda c: c["quantization_config"]["ignore"].append("re:.*gate_up_proj$"), "gate_up_proj"),
        (
            lambda c: c["quantization_config"]["ignore"].append("re:.*experts.0.down_proj"),
            "up_proj",
        ),
        (lambda c: c["quantization_config"]["ignore"].append("re:.*q_a_proj$"), "kv_a_proj"),
        (lambda c: second_group(c, "re:.*mlp.(gate|up)_proj$"), "gate_up_proj"),
        (lambda c: c["quantization_config"].update(ignore="lm_head"), "ignore"),
        (lambda c: c["quantization_config"]["ignore"].append("re:("), "regular expressions"),
        (lambda c: c["quantization_config"].update(config_groups={}), "config_groups"),
        (lambda c: c.update(quantization_config=["fp8"]), "an object"),
    ],
)
def test_configs_that_engines_cannot_follow(
    change: Callable[[dict[str, Any]], object], says: str
) -> None:
    config = copy.deepcopy(compressed(8))
    change(config)
    with pytest.raises(InvalidInputError, match=says):
        stored_model(config)


def test_a_group_size_that_does_not_divide_is_refused() -> None:
    config = copy.deepcopy(compressed(4)) | {"moe_intermediate_size": 48}
    with pytest.raises(InvalidInputError, match="K divisible by 32"):
        stored_model(config)


def weights(config: dict[str, Any]) -> dict[str, Any]:
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert isinstance(group, dict)
    return group["weights"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["quantization_config"].update(quant_method="hqq"), "hqq"),
        (lambda c: c["quantization_config"].pop("quant_method"), "None"),
        (lambda c: c["quantization_config"].update(format="naive-quantized"), "naive-quantized"),
        (lambda c: weights(c).update(num_bits=3), "int3"),
        (lambda c: weights(c).update(group_size=64, strategy="group"), "strategy group"),
        (lambda c: weights(c).update(symmetric=None), "symmetric"),
        (lambda c: weights(c).update(actorder="group"), "actorder"),
        (lambda c: c["quantization_config"].update(kv_cache_scheme={"num_bits": 8}), "kv_cache"),
        (lambda c: c["quantization_config"].update(linear_fp8_config={"quant_method": "x"}), "x"),
    ],
)
def test_unknown_layouts(change: Callable[[dict[str, Any]], object], says: str) -> None:
    config = copy.deepcopy(compressed(8))
    change(config)
    with pytest.raises(UnsupportedError, match=says):
        stored_model(config)


def test_a_draft_of_more_than_one_layer_is_not_a_single_layer_s(pristine: Path) -> None:
    config = read_json(pristine / "config.json")
    with pytest.raises(InvalidInputError, match="num_hidden_layers"):
        target_of("lightllm").stored_draft(config)


UNTESTED = [
    ("a8w8_fp8", "weight_only_int8"),
    ("weight_only_int8", "a8w8_fp8"),
    ("weight_only_int8", "bf16"),
    ("bf16", "a8w8_fp8"),
    ("a8w8_fp8", "bf16"),
    ("weight_only_int4", "a8w8_fp8"),
    ("a8w8_fp8_wint4", "weight_only_int8"),
    ("bf16", "weight_only_int8"),
]


@pytest.mark.parametrize("target", ["vllm", "sglang"])
@pytest.mark.parametrize(("base", "mtp"), UNTESTED)
def test_pairs_outside_the_table(
    base: str, mtp: str, target: str, row_sources: dict[str, Path], output: Path
) -> None:
    options = pair(base, mtp, "--target", target, "--allow-untested-pair")
    assert quantize(row_sources["fp8"], output, *options).code == 0
    for part in ("main", "mtp"):
        stored = stored_model(read_json(output / part / "config.json"))
        promised = (stored.main if part == "main" else stored.mtp).tensors.values()
        assert compare(Checkpoint.open(output / part).tensors, promised) == []


def test_unquantized_weights_may_be_in_any_float_dtype() -> None:
    """AutoRound stores the biases of its linears in float16 in a model of bf16; engines cast."""
    config = read_json(FIXTURES / "glm4-moe-tiny/config.json")
    stored = stored_model({**config, QUANTIZATION: METHODS["auto-round"].config})
    for name in ("self_attn.q_proj.bias", "self_attn.q_norm.weight"):
        dtypes = stored.tensors[f"model.layers.0.{name}"].dtypes
        assert dtypes == (DType.BF16, DType.F32, DType.F16)


def test_scales_of_caches_are_no_tensors_too_many() -> None:
    """As ModelOpt and compressed-tensors name those of keys and values."""
    layer = "model.layers.0.self_attn."
    scales = ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale")
    own = [*(f"{layer}{name}" for name in scales), "backbone.layers.1.mixer.k_proj.k_scale"]
    assert compare(dict.fromkeys(own, _Scalar()), []) == []
    others = [f"{layer}k_proj.weight_scale", "model.k_scale", f"{layer}kk_scale"]
    found = compare(dict.fromkeys(others, _Scalar()), [])
    assert [one.tensor for one in found] == others


class _Scalar(NamedTuple):
    dtype: DType = DType.F32
    shape: tuple[int, ...] = ()
