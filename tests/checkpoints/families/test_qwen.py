"""Qwen3-Next and Qwen3.5 by name: the tensors that configs promise are those that transformers
saves, and those of the MTP module that the releases have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import safe_open

from cases import run_program
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.parts import GatedDeltaNet, Gqa, Moe
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.reader import Checkpoint
from runtime.checkpoints import SMALL_CONFIGS, changed, text_part, write_checkpoint

Shapes = dict[str, tuple[int, ...]]
_NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
CONFIGS = QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT = [
    SMALL_CONFIGS[name] for name in _NAMES
]
IDS = [config["model_type"] for config in CONFIGS]
FUSED = (
    "mtp.layers.0.mlp.experts.gate_up_proj",
    "mtp.layers.0.mlp.experts.down_proj",
)


def saved_by_transformers(config: dict[str, Any], folder: Path) -> Shapes:
    """The shapes of a random model that transformers makes of a config, and saves."""
    made = transformers.AutoConfig.for_model(**config)
    getattr(transformers, config["architectures"][0])(made).save_pretrained(folder)
    shapes: Shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes


def main_of(family: ModelSpec) -> Shapes:
    return {name: one.shape for name, one in family.tensors.items() if one.mtp_layer is None}


def mtp_of(family: ModelSpec) -> Shapes:
    return {name: one.shape for name, one in family.tensors.items() if one.mtp_layer is not None}


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_main_model_has_the_tensors_that_transformers_saves(
    config: dict[str, Any], tmp_path: Path
) -> None:
    saved = saved_by_transformers(config, tmp_path)
    family = family_of(config, saved)
    described = {name: shape for name, shape in saved.items() if not family.carries(name)}
    assert main_of(family) == described
    assert (len(described) < len(saved)) == ("vision_config" in config)
    assert (family.head == family.embedding) == text_part(config)["tie_word_embeddings"]


DENSE_MTP: Shapes = {
    "mtp.fc.weight": (64, 128),
    "mtp.pre_fc_norm_embedding.weight": (64,),
    "mtp.pre_fc_norm_hidden.weight": (64,),
    "mtp.norm.weight": (64,),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "mtp.layers.0.post_attention_layernorm.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (256, 64),
    "mtp.layers.0.self_attn.k_proj.weight": (64, 64),
    "mtp.layers.0.self_attn.v_proj.weight": (64, 64),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 128),
    "mtp.layers.0.self_attn.q_norm.weight": (32,),
    "mtp.layers.0.self_attn.k_norm.weight": (32,),
    "mtp.layers.0.mlp.gate_proj.weight": (96, 64),
    "mtp.layers.0.mlp.up_proj.weight": (96, 64),
    "mtp.layers.0.mlp.down_proj.weight": (64, 96),
}
SPARSE_MTP: Shapes = {
    **{name: shape for name, shape in DENSE_MTP.items() if ".mlp." not in name},
    "mtp.layers.0.mlp.gate.weight": (8, 64),
    "mtp.layers.0.mlp.shared_expert.gate_proj.weight": (32, 64),
    "mtp.layers.0.mlp.shared_expert.up_proj.weight": (32, 64),
    "mtp.layers.0.mlp.shared_expert.down_proj.weight": (64, 32),
    "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 64),
}
APART: Shapes = {
    f"mtp.layers.0.mlp.experts.{expert}.{name}_proj.weight": (64, 64)
    for expert in range(8)
    for name in ("gate", "up", "down")
}


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_the_mtp_module_is_named_as_released(config: dict[str, Any]) -> None:
    """15 tensors of a dense model, and neither an embedding nor a head of its own."""
    family = family_of(config)
    wanted = {**SPARSE_MTP, **APART} if "num_experts" in text_part(config) else DENSE_MTP
    assert mtp_of(family) == wanted
    assert {family.mtp_layer_of(name) for name in wanted} == {4}
    assert family.shared == ()
    assert not any(spec.optional for spec in family.tensors.values())
    (module,) = family.mtp
    assert (module.modules.embedding, module.modules.head) == (None, None)


def test_experts_are_fused_or_not_as_they_are_stored() -> None:
    """Per layer: as Qwen3.5 has them without names, as Qwen3.6 by those of the MTP layer, and one
    by one where a quantizer took them apart."""
    usual = family_of(QWEN3_5_MOE)
    assert usual.tensors["model.language_model.layers.0.mlp.experts.down_proj"].shape == (8, 64, 64)
    assert usual == family_of(QWEN3_5_MOE, ["model.visual.x", *mtp_of(usual)])
    newer = family_of(QWEN3_5_MOE, FUSED)
    assert mtp_of(newer) == {**SPARSE_MTP, FUSED[0]: (8, 128, 64), FUSED[1]: (8, 64, 64)}
    assert main_of(newer) == main_of(usual)
    codes = "model.language_model.layers.1.mlp.experts.0.up_proj.weight_packed"
    apart = family_of(QWEN3_5_MOE, [*FUSED, codes])
    kinds = [layer.feed_forward for layer in apart.every_layer]
    assert [isinstance(kind, Moe) and kind.is_fused for kind in kinds] == [True, False] + [True] * 3


def test_layers_are_linear_or_full_as_config_says() -> None:
    def kinds(config: dict[str, Any]) -> list[type]:
        return [type(layer.attention) for layer in family_of(config).layers]

    usual = [GatedDeltaNet] * 3 + [Gqa]
    assert kinds(QWEN3_NEXT) == kinds(QWEN3_5) == usual
    assert kinds(QWEN3_NEXT | {"full_attention_interval": 2}) == [GatedDeltaNet, Gqa] * 2
    listed = ["full_attention", "linear_attention"] * 2
    assert kinds(changed(QWEN3_5, layer_types=listed)) == [Gqa, GatedDeltaNet] * 2
    (layer, *_) = family_of(QWEN3_5).layers
    assert layer.attention_prefix == "model.language_model.layers.0.linear_attn"


def test_facts_of_the_arithmetic() -> None:
    family = family_of(QWEN3_5)
    assert family.facts.norm_offset == 1.0
    full = family.layers[3].attention
    assert isinstance(full, Gqa)
    assert full.sizes.is_gated and full.sizes.has_norms and not full.sizes.has_bias
    assert (full.rope.size, full.rope.theta) == (8, 10000000.0)
    moe = family_of(QWEN3_NEXT | {"norm_topk_prob": False}).layers[0].feed_forward
    assert isinstance(moe, Moe)
    assert (moe.router.scoring, moe.router.method) == ("softmax", "greedy")
    assert not moe.router.routing.normalises
    sparse = family_of(changed(QWEN3_5_MOE, norm_topk_prob=False)).layers[0].feed_forward
    assert isinstance(sparse, Moe) and sparse.router.routing.normalises, "whatever the field says"


def test_nothing_small_is_quantized() -> None:
    """Gates, routers, convolutions, decays and the MTP module's projection stay as they are."""
    for config in CONFIGS:
        tensors = family_of(config).tensors.values()
        linears = {spec.name.split(".")[-2] for spec in tensors if spec.is_linear_weight}
        assert linears <= {
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            *("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj"),
        }
        roles = {spec.name.split(".")[-1]: spec.role for spec in tensors}
        assert roles["A_log"] is roles["dt_bias"] is Role.DELTA_GATES


def test_ties_may_be_told_in_either_config() -> None:
    for outer, inner, tied in ((True, None, True), (False, True, True), (False, False, False)):
        text = {k: v for k, v in QWEN3_5["text_config"].items() if k != "tie_word_embeddings"}
        text |= {} if inner is None else {"tie_word_embeddings": inner}
        family = family_of(QWEN3_5 | {"tie_word_embeddings": outer, "text_config": text})
        assert ("lm_head.weight" not in family.tensors) == tied


def test_configs_count_the_mtp_layer_or_not() -> None:
    def count(config: Mapping[str, Any]) -> int:
        return len(family_of(config).mtp)

    assert count(QWEN3_NEXT) == 1
    assert count(QWEN3_NEXT | {"num_nextn_predict_layers": 0}) == 0
    assert count(changed(QWEN3_5, mtp_num_hidden_layers=0)) == 0
    without = {k: v for k, v in QWEN3_5["text_config"].items() if k != "mtp_num_hidden_layers"}
    assert count(QWEN3_5 | {"text_config": without}) == 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mtp_num_hidden_layers": 2}, UnsupportedError, "more MTP layers"),
        ({"mtp_num_hidden_layers": -1}, InvalidInputError, "mtp_num_hidden_layers"),
        ({"mtp_use_dedicated_embeddings": True}, UnsupportedError, "dedicated"),
        ({"attn_output_gate": False}, UnsupportedError, "attn_output_gate"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias"),
        ({"layer_types": ["full_attention"]}, InvalidInputError, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, InvalidInputError, "text_config.layer_types"),
        ({"linear_num_value_heads": 3}, InvalidInputError, "share a key head"),
        ({"linear_conv_kernel_dim": 0}, InvalidInputError, "linear_conv_kernel_dim"),
        ({"num_experts_per_tok": 9}, InvalidInputError, "num_experts_per_tok"),
        ({"num_experts": 60_000}, InvalidInputError, "more tensors than any model"),
    ],
    ids=str,
)
def test_others_are_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        family_of(changed(QWEN3_5_MOE, **changes))


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}], ids=str)
def test_next_without_experts_in_some_layer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        family_of(QWEN3_NEXT | changes)


@pytest.mark.parametrize("names", [(), FUSED], ids=["one by one", "fused"])
def test_a_folder_is_inspected(names: tuple[str, ...], tmp_path: Path) -> None:
    """A vision tower is no problem of it, and neither layout of experts is."""
    folder = write_checkpoint(tmp_path, QWEN3_5_MOE, names=names)
    checkpoint = Checkpoint.open(folder)
    assert any(name.startswith("model.visual.") for name in checkpoint.tensors)
    stored = stored_model(checkpoint.config, checkpoint.tensors)
    assert stored.differences(checkpoint.tensors) == []
    outcome = run_program("inspect", folder)
    assert outcome.code == 0, outcome.err
    assert "other parts" in outcome.out and "unexpected" not in outcome.out
    assert "MTP layers: 4 (mtp.*)." in outcome.out


def test_a_tensor_of_no_part_is_a_problem(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, QWEN3_5))
    known = {name: one for name, one in checkpoint.tensors.items() if name != "mtp.fc.weight"}
    known["model.vision.x"] = checkpoint.tensors["mtp.fc.weight"]
    found = stored_model(checkpoint.config, known).differences(known)
    assert [one.tensor for one in found] == ["mtp.fc.weight", "model.vision.x"]
