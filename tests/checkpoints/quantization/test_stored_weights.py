"""One weight of a stored model: its tensors, their released names, and what they encode."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from cases import MTP_LAYER
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import UNQUANTIZED, EncodedWeight, Fp8Block, Int8Channel
from mtp_checkpoints.quantization.mismatches import StoredTensor, compare
from mtp_checkpoints.quantization.native import NativeFp8
from mtp_checkpoints.quantization.stored import StoredModel, stored_model, stored_mtp, stored_source
from quantize_rows import CONFIGS
from runtime.checkpoints import SMALL_CONFIGS

FP8, BF16 = CONFIGS["fp8"], CONFIGS["bf16"]
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
LAYER = f"model.layers.{MTP_LAYER}"
UP = "model.layers.1.mlp.experts.2.up_proj"


class StoredLayout(NamedTuple):
    """A tensor on disk, as far as comparing needs it."""

    dtype: str
    shape: tuple[int, ...]


def compressed(**changes: Any) -> dict[str, Any]:
    """A config whose linears are int8."""
    groups = {"g": {"targets": ["Linear"], "weights": INT8}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*eh_proj$", "re:.*shared_head.*"],
        "config_groups": groups,
    }
    return BF16 | {"quantization_config": quantization | changes}


def w4afp8() -> dict[str, Any]:
    return FP8 | {"quantization_config": {"quant_method": "w4afp8"}}


def renamed(name: str, layer: int) -> str:
    return name.replace(f"model.layers.{layer}", f"draft{layer}")


def test_a_weight_of_one_tensor_and_of_several() -> None:
    one = stored_model(BF16).weights[f"{UP}.weight"]
    assert one.tensors == (StoredTensor(f"{UP}.weight", one.weight.shape, one.weight.dtypes),)
    assert (one.storage, one.transposed) == ("bf16", False)
    assert one.released_names == (f"{UP}.weight",)
    several = stored_model(compressed()).weights[f"{UP}.weight"]
    rows, columns = several.weight.shape
    packed = f"{UP}.weight_packed"
    assert several.tensors == (
        StoredTensor(packed, (rows, columns // 4), ("I32",)),
        StoredTensor(f"{UP}.weight_scale", (rows, 1), ("BF16",), scale_of=packed),
        StoredTensor(f"{UP}.weight_shape", (2,), ("I64",), scale_of=packed),
    )
    assert several.released_names == tuple(tensor.name for tensor in several.tensors)


def test_released_names_of_a_draft() -> None:
    stored = stored_mtp(FP8, renamed, transposes=False)
    weight = f"{LAYER}.mlp.shared_experts.up_proj.weight"
    one = stored.weights[weight]
    assert [tensor.name for tensor in one.tensors] == [
        f"draft{MTP_LAYER}.mlp.shared_experts.up_proj.weight",
        f"draft{MTP_LAYER}.mlp.shared_experts.up_proj.weight_scale_inv",
    ]
    assert one.released_names == (weight, f"{weight}_scale_inv")
    norm = stored.weights[f"{LAYER}.enorm.weight"]
    assert norm.tensors[0].name == f"draft{MTP_LAYER}.enorm.weight"
    assert norm.released_names == (f"{LAYER}.enorm.weight",)
    assert all(name.startswith(LAYER) for name in stored.weights)
    assert stored.weights.keys() == stored_model(FP8).mtp.weights.keys()
    beside = stored_model(w4afp8()).weights[f"{UP}.weight"]
    assert beside.released_names == (
        f"{UP}.weight",
        f"{UP}.weight_scale_inv",
        "model.layers.1.mlp.experts.2.w3.input_scale",
    )


def test_matrices_of_linears_may_be_stored_transposed() -> None:
    plain, turned = (stored_mtp(FP8, renamed, transposes=turn) for turn in (False, True))
    for name, one in plain.weights.items():
        other = turned.weights[name]
        turns = len(one.weight.shape) == 2 and one.weight.role is not Role.EMBEDDING
        assert other.transposed is turns, name
        assert not one.transposed
        shapes = [tensor.shape[::-1] if turns else tensor.shape for tensor in one.tensors]
        assert [tensor.shape for tensor in other.tensors] == shapes
    assert any(one.transposed for one in turned.weights.values())
    assert any(
        not one.transposed and len(one.weight.shape) == 2 for one in turned.weights.values()
    ), "an embedding is a lookup table"


def test_tensors_are_encoded_weights() -> None:
    stored = stored_model(BF16).weights[f"{UP}.weight"]
    values = torch.randn(stored.weight.shape)
    assert stored.encoded([values]) == EncodedWeight(stored.format, values)
    one = stored_model(compressed()).weights[f"{UP}.weight"]
    rows, columns = one.weight.shape
    codes, scale = torch.zeros(rows, columns // 4, dtype=torch.int32), torch.ones(rows, 1)
    encoded = one.encoded([codes, scale, torch.tensor([rows, columns])])
    assert encoded.format == Int8Channel()
    assert encoded.codes is codes and encoded.scale is scale
    with pytest.raises(InvalidInputError, match=f"{UP}.weight_shape contradicts"):
        one.encoded([codes, scale, torch.tensor([columns, rows + 1])])
    with pytest.raises(ValueError, match="shorter"):
        one.encoded([codes, scale])


def test_transposed_tensors_are_turned_back() -> None:
    weight = f"{LAYER}.mlp.shared_experts.down_proj.weight"
    one = stored_mtp(FP8, renamed, transposes=True).weights[weight]
    codes, scale = torch.randn(one.tensors[0].shape), torch.randn(one.tensors[1].shape)
    encoded = one.encoded([codes, scale])
    assert encoded.format == Fp8Block()
    assert encoded.shape == one.weight.shape
    assert torch.equal(encoded.codes, codes.T) and encoded.codes.is_contiguous()
    assert encoded.scale is not None
    assert torch.equal(encoded.scale, scale.T) and encoded.scale.is_contiguous()


def test_parts_of_a_model() -> None:
    whole = stored_model(FP8)
    assert whole.native == NativeFp8(("F32", "BF16", "F16"), ())
    assert stored_model(BF16).native is None
    assert whole.quantization == FP8["quantization_config"]
    main, mtp = whole.main.weights, whole.mtp.weights
    assert {**main, **mtp} == whole.weights
    assert {one.weight.mtp_layer for one in main.values()} == {None}
    assert {one.weight.mtp_layer for one in mtp.values()} == {MTP_LAYER}
    for name, one in whole.weight_of.items():
        assert name in [tensor.name for tensor in one.tensors]
    assert whole.weight_of.keys() == whole.tensors.keys()


def on_disk(stored: StoredModel) -> dict[str, StoredLayout]:
    """The tensors of a folder that holds all that it must."""
    promised = stored.tensors.values()
    return {tensor.name: StoredLayout(tensor.dtypes[0], tensor.shape) for tensor in promised}


DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"
EMBEDDING = f"{LAYER}.embed_tokens.weight"
CHANGES: dict[str, dict[str, StoredLayout | None]] = {
    "none": {},
    "lost": {DOWN: None},
    "a lost scale": {f"{DOWN}_scale_inv": None},
    "a scale alone": {DOWN: None, f"{UP}.weight": None},
    "another dtype": {DOWN: StoredLayout("BF16", (1, 1))},
    "another shape": {DOWN: StoredLayout("F8_E4M3", (1, 1))},
    "another dtype that is as good": {
        f"{LAYER}.enorm.weight": StoredLayout("F32", (FP8["hidden_size"],))
    },
    "of no weight": {"a": StoredLayout("BF16", (1,))},
    "one for another": {DOWN: None, "a": StoredLayout("BF16", (1,))},
    "no own copy": {EMBEDDING: None},
    "no own copy, and of no weight": {EMBEDDING: None, "a": StoredLayout("BF16", (1,))},
}


@pytest.mark.parametrize("change", CHANGES)
def test_differences_are_those_of_each_tensor(change: str) -> None:
    """Tensors that are alike are looked at together first."""
    stored = stored_model(FP8)
    folder = {**on_disk(stored), **CHANGES[change]}
    tensors = {name: tensor for name, tensor in folder.items() if tensor is not None}
    found = stored.differences(tensors)
    assert found == compare(tensors, stored.tensors.values())
    assert bool(found) is (change not in ("none", "another dtype that is as good", "no own copy"))
    assert stored.mtp.differences(tensors) == compare(tensors, stored.mtp.tensors.values())


def test_embeddings_and_heads_are_found_without_all_others() -> None:
    stored = stored_model(FP8)
    tables = {"model.embed_tokens", "lm_head", f"{LAYER}.embed_tokens", f"{LAYER}.shared_head.head"}
    assert stored.tables == {f"{name}.weight": stored.weights[f"{name}.weight"] for name in tables}


def test_the_main_part_beside_other_mtp_layers() -> None:
    main, donor = stored_model(BF16), stored_model(FP8)
    joined = main.with_mtp_of(donor, donor.quantization)
    assert joined.quantization == donor.quantization
    assert list(joined.weights.items()) == [*main.main.weights.items(), *donor.mtp.weights.items()]


def test_the_same_weights_read_anew() -> None:
    part = stored_model(FP8).mtp
    again = part.reread(compressed()["quantization_config"], lambda name: f"x.{name}")
    assert again.weights.keys() == part.weights.keys()
    assert again.quantization == compressed()["quantization_config"]
    one = again.weights[f"{LAYER}.mlp.shared_experts.up_proj.weight"]
    assert one.tensors[0].name == f"x.{LAYER}.mlp.shared_experts.up_proj.weight_packed"


@pytest.mark.parametrize("method", [["fp8"], {"fp8": 1}, 8])
def test_a_method_that_is_no_name_is_refused(method: object) -> None:
    with pytest.raises(UnsupportedError, match="quant_method"):
        stored_model(FP8).mtp.reread({"quant_method": method}, str)


def test_a_source_is_unquantized_or_native_or_carried() -> None:
    for config in (FP8, BF16):
        assert stored_source(config) == stored_model(config)
    with pytest.raises(UnsupportedError, match="Start from the original checkpoint"):
        stored_source(w4afp8())
    carried = stored_source(compressed())  # into files that hold its codes
    assert carried.unkept == "int8_channel" and carried.scheme is None
    with pytest.raises(UnsupportedError, match="model_type"):
        stored_source({"model_type": "x", "quantization_config": {"quant_method": "y"}})


def refusal(config: dict[str, Any]) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        stored_model(config)
    return caught.value


@pytest.mark.parametrize(
    ("ignored", "names"),
    [
        ("re:.*1.mlp.experts.0.down_proj", "experts.0.down_proj and model.layers.1.mlp.experts.0"),
        ("re:.*0.mlp.gate_proj$", "model.layers.0.mlp.gate_proj and model.layers.0.mlp.up_proj"),
        (
            "re:.*0.mlp.gate_up_proj$",
            "model.layers.0.mlp.gate_proj and model.layers.0.mlp.gate_up_proj",
        ),
    ],
)
def test_linears_that_engines_load_together_are_alike(ignored: str, names: str) -> None:
    error = refusal(compressed(ignore=[ignored, "lm_head", "re:.*eh_proj$", "re:.*shared_head.*"]))
    assert names in error.what and error.what.endswith("different formats")
    assert error.expected == "one format: engines load them together"
    found = "int8_channel and not quantized"
    other = "not quantized and int8_channel"
    assert error.found == (found if "gate_up" in ignored else other)
    assert "patterns must match fused names too" in str(error.todo)


def test_k_that_the_format_does_not_divide() -> None:
    groups = {
        "g": {
            "targets": ["re:.*experts.*"],
            "weights": INT8 | {"num_bits": 4, "strategy": "group", "group_size": 64},
        }
    }
    error = refusal(compressed(config_groups=groups) | {"moe_intermediate_size": 96})
    assert error.what.startswith("config.json's quantization does not fit model.layers.")
    assert error.what.endswith("down_proj.weight")
    assert error.expected == "K divisible by 64 under int4_group"
    assert error.found == "[N, K] = [128, 96], which no list of it leaves out"
    assert "have that leave it out" in str(error.todo)


@pytest.mark.parametrize("listed", [True, False])
def test_a_head_of_another_name_is_left_out_by_that_of_engines(listed: bool) -> None:
    """Inkling's is `unembed`, and vLLM asks for `lm_head`."""
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head"] if listed else [],
    }
    config = SMALL_CONFIGS["inkling_mm_model"] | {"quantization_config": quantization}
    stored = stored_model(config)
    (head,) = (one for one in stored.weights.values() if one.weight.role is Role.HEAD)
    assert head.weight.module.endswith("unembed")
    assert (head.format is UNQUANTIZED) == listed


@pytest.mark.parametrize(
    ("model_type", "last", "is_built"),
    [
        ("qwen3_5", "in_proj_b", True),
        ("bailing_hybrid", "f_proj", True),
        ("qwen4_exp", "index_qk_proj", True),
        ("deepseek_v32", "weights_proj", False),
        ("glm5_next", "f_a_proj", False),
        ("glm5_next", "self_attn.b_proj", False),
    ],
)
def test_gates_that_vllm_builds_by_the_config(model_type: str, last: str, is_built: bool) -> None:
    """Of those that are stored with scales, which say that a tool quantized them."""
    plain = SMALL_CONFIGS[model_type]
    gates = [
        spec
        for spec in stored_model(plain).specs
        if spec.module.endswith(last) and spec.mtp_layer is None
    ]
    scales = {f"{spec.module}.weight_scale" for spec in gates}
    assert scales
    roles = {spec.name: spec.role for spec in stored_model(plain, scales).specs}
    assert all((roles[spec.name] is Role.ATTENTION) == is_built for spec in gates)
    assert all(spec.role is not Role.ATTENTION for spec in gates)
