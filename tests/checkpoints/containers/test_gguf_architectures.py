"""Names and keys of GGUF's architectures against the package that llama.cpp's converter writes
with, and back to the models that they were made from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF, ARCHITECTURES
from mtp_checkpoints.containers.gguf_architectures.base import Change, Place, Released
from mtp_checkpoints.containers.gguf_values import Value, ValueType, text, u32
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.spec import ModelSpec
from runtime.checkpoints import SMALL_CONFIGS, YARN

KEPT_APART = ".kv_b_proj."
# Those whose module is a layer after the last; others are in tests/bundle/test_gguf_qwen.py.
MODEL_TYPES = [name for name, one in ARCHITECTURE_OF.items() if not one.has_mtp_names]
LATENT = [name for name in MODEL_TYPES if name != "glm4_moe"]


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """A small config of a family that llama.cpp has, with one MTP layer."""
    changes = {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16", **changes}
    return {**SMALL_CONFIGS[model_type], "model_type": model_type, **changes}


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    return family_of(config_of(model_type, **changes))


def scaling_of(model_type: str, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """YaRN as the releases of a family would have it."""
    if scaling is None or model_type != "glm4_moe":
        return scaling
    return {key: value for key, value in scaling.items() if "mscale" not in key}


def names_of(spec: ModelSpec) -> list[str]:
    """The released names of a model, kv_b_proj in the halves that a file has of it."""
    names = []
    for name in spec.tensors:
        halves = [f".{half}_proj." for half in Change] if KEPT_APART in name else [KEPT_APART]
        names += [name.replace(KEPT_APART, half) for half in halves]
    return names


def converters_name(name: str, model_type: str, layers: int) -> str:
    """The name that the gguf package has for a released one."""
    gguf = pytest.importorskip("gguf")
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    # Those of the package know fewer tensors than llama.cpp writes: others have the same names.
    archs = (ARCHITECTURE_OF[model_type].name, "glm-dsa", "glm4moe")
    maps = [gguf.get_tensor_name_map(by_name[a], layers) for a in archs if a in by_name]
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = re.sub(r"experts\.\d+\.", "experts.", name)
    found = (own.get_name(name, try_suffixes=(".weight", ".bias")) for own in maps)
    return str(next(own for own in found if own is not None))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_names_are_those_of_the_converter(model_type: str) -> None:
    architecture, spec = ARCHITECTURE_OF[model_type], spec_of(model_type)
    layers = len(spec.every_layer)
    places = {name: architecture.place(name) for name in names_of(spec)}
    assert None not in places.values()
    assert len(set(places.values())) == len(places)  # no two at one place
    for name, place in places.items():
        assert place is not None
        assert place.name == converters_name(name, model_type, layers), name
        assert (place.expert is not None) is (".experts." in name)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_names_lead_back_to_the_released_ones(model_type: str) -> None:
    architecture, spec = ARCHITECTURE_OF[model_type], spec_of(model_type)
    experts = config_of(model_type)["n_routed_experts"]
    places = [architecture.place(name) for name in names_of(spec)]
    found: set[str] = set()
    for name in {place.name for place in places if place is not None}:
        released = architecture.released(name, experts)
        assert released is not None, name
        found |= set(released.names)
    assert found == set(spec.tensors)


def test_halves_of_the_latent_projection_are_told_apart() -> None:
    name = ("model.layers.3.self_attn.kv_b_proj.weight",)
    deepseek = ARCHITECTURES["deepseek2"]
    assert deepseek.released("blk.3.attn_k_b.weight") == Released(name, Change.KEYS)
    assert deepseek.released("blk.3.attn_v_b.weight") == Released(name, Change.VALUES)
    assert deepseek.released("blk.3.attn_kv_b.weight") == Released(name)  # of older files


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_module_alone_has_its_own_tables(model_type: str) -> None:
    one, layer = ARCHITECTURE_OF[model_type], "model.layers.4"
    own = {
        f"{layer}.embed_tokens.weight": "token_embd.weight",
        f"{layer}.shared_head.head.weight": "output.weight",
    }
    for released, name in own.items():
        assert one.place(released, module_alone=4) == Place(name)
        assert one.released(name, module_alone=4) == Released((released,))
        assert one.place(released) != Place(name)
    assert one.place("model.norm.weight", module_alone=4) == Place("output_norm.weight")
    assert one.released("output_norm.weight", module_alone=4) == Released(())
    norm = f"{layer}.shared_head.norm.weight"
    assert one.place(norm, module_alone=4) == Place("blk.4.nextn.shared_head_norm.weight")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.gate_proj.weight",  # of all experts, which none is called
        "model.layers.01.input_layernorm.weight",
        "model.layers.1.mlp.unknown.weight",
        "visual.blocks.0.weight",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
    ],
)
def test_other_names_have_no_place(name: str) -> None:
    assert all(one.place(name) is None for one in ARCHITECTURES.values())


@pytest.mark.parametrize("name", ["blk.1.unknown.weight", "rope_freqs.weight", "blk.x.ffn_up"])
def test_other_tensors_have_no_released_name(name: str) -> None:
    assert all(one.released(name) is None for one in ARCHITECTURES.values())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("scaling", [None, YARN])
def test_keys_lead_back_to_the_model(model_type: str, scaling: dict[str, Any] | None) -> None:
    """Everything that tensors, shapes and arithmetic depend on comes back from the keys."""
    spec = spec_of(model_type, rope_scaling=scaling_of(model_type, scaling), rms_norm_eps=1e-6)
    architecture = ARCHITECTURE_OF[model_type]
    keys = architecture.keys(spec, modules=1)
    if model_type == "glm4_moe_lite":
        keys["tokenizer.ggml.pre"] = text("glm4")
    names = [place.name for name in names_of(spec) if (place := architecture.place(name))]
    config = architecture.config(keys, names)
    assert config["model_type"] == model_type
    again = family_of(config)
    assert again.tensors == spec.tensors
    assert again.layers == spec.layers
    assert again.mtp == spec.mtp
    assert again.facts.norm_eps == spec.facts.norm_eps == 1e-6


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_keys_have_the_names_of_the_package(model_type: str) -> None:
    keys = pytest.importorskip("gguf").constants.Keys
    rooms = (keys.LLM, keys.Attention, keys.Attention.Indexer, keys.Rope, keys.General)
    known = {name for room in rooms for name in vars(room).values() if isinstance(name, str)}
    one = ARCHITECTURE_OF[model_type]
    written = one.keys(spec_of(model_type, rope_scaling=scaling_of(model_type, YARN)), modules=1)
    names = {key.replace(one.name, "{arch}", 1) for key in written}
    later = {"{arch}.attention.indexer.types"}  # newer than the package that tests install
    assert names - later <= known


def test_layers_are_counted_with_and_without_the_module() -> None:
    spec = spec_of("deepseek_v3")
    one = ARCHITECTURES["deepseek2"]
    alone = one.keys(spec, modules=0)
    assert alone["deepseek2.block_count"] == u32(len(spec.layers))
    assert "deepseek2.nextn_predict_layers" not in alone
    both = one.keys(spec, modules=1)
    assert both["deepseek2.block_count"] == u32(len(spec.layers) + 1)
    assert both["deepseek2.nextn_predict_layers"] == u32(1)


def test_latent_attention_is_described_as_llama_cpp_runs_it() -> None:
    config = config_of("deepseek_v3", rope_scaling=YARN)
    keys = ARCHITECTURES["deepseek2"].keys(family_of(config), modules=1)
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    assert keys["deepseek2.attention.head_count_kv"] == u32(1)
    assert keys["deepseek2.attention.key_length"] == u32(latent + rope)
    assert keys["deepseek2.attention.value_length"] == u32(latent)
    assert keys["deepseek2.attention.key_length_mla"] == u32(config["qk_nope_head_dim"] + rope)
    multiplier = keys["deepseek2.rope.scaling.yarn_log_multiplier"]
    assert multiplier == Value(ValueType.FLOAT32, 0.1)
    assert keys["deepseek2.expert_gating_func"] == u32(2)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 0.5}}, "scales of YaRN"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale_all_dim": 0.0}}, "scales of YaRN"),
        ("glm4_moe", {"rope_scaling": YARN}, "scales of YaRN"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaling of rotary"),
        (
            "deepseek_v3",
            {"moe_layer_freq": 2, "num_hidden_layers": 4},
            "dense layers behind sparse ones",
        ),
        ("glm4_moe", {"scoring_func": "sqrtsoftplus"}, "gating function"),
    ],
)
def test_what_no_key_says_is_refused(model_type: str, changes: dict[str, Any], words: str) -> None:
    spec = spec_of(model_type, **changes)
    with pytest.raises(UnsupportedError, match=words):
        ARCHITECTURE_OF[model_type].keys(spec, modules=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("block_count", text("four")),
        ("expert_count", Value(ValueType.BOOL, True)),
        ("attention.kv_lora_rank", Value(ValueType.FLOAT32, 4.5)),
        ("rope.freq_base", text("10000")),
        ("rope.scaling.type", u32(1)),
        ("expert_weights_norm", u32(1)),
        ("expert_feed_forward_length", Value(ValueType.UINT32, (64, 32), is_array=True)),
    ],
)
def test_a_key_that_is_not_usable_is_named(key: str, value: Value | None) -> None:
    one = ARCHITECTURES["deepseek2"]
    keys = {**one.keys(spec_of("deepseek_v3", rope_scaling=YARN), modules=1)}
    name = f"deepseek2.{key}"
    keys.pop(name)
    if value is not None:
        keys[name] = value
    with pytest.raises(InvalidInputError, match=re.escape(name)):
        one.config(keys, ())
