"""Readings of others' configs by vLLM and SGLang, where they are not what the method's words say;
tests/engines/test_foreign_readers.py holds the same against the engines' own code."""

from __future__ import annotations

from typing import Any

import pytest

from cases import read_json
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import SGLANG_DRAFT as DRAFT
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.engine_draft import sglang_deepseek
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.readers import (
    Reads,
    as_it_is,
    sglang_reads,
    vllm_reads,
    with_renamed_entries,
)
from quantized_by_others import METHODS
from runtime.checkpoints import SMALL_CONFIGS
from verify.foreign import GLM

LAYER = "model.layers.3"
OWN = f"{LAYER}.self_attn.o_proj"
EXPERTS = f"{LAYER}.mlp.experts"
PROJECTION = f"{LAYER}.eh_proj"
EXPERT = f"{EXPERTS}.0.up_proj"
COMPRESSED = METHODS["compressed-tensors, int4"].config
INTEGERS = METHODS["compressed-tensors, int8"].config
MODELOPT = METHODS["modelopt nvfp4"].config


def read(reads: Reads, quantization: Any, *tensors: str) -> dict[str, Any]:
    config = read_json(GLM / "config.json") | {"quantization_config": quantization}
    return reads(config, tensors)


def is_left_out(reads: Reads, quantization: Any, module: str, *tensors: str) -> bool:
    found = read(reads, quantization, *tensors)["quantization_config"]
    role = Role.ROUTED_EXPERT if module.startswith(EXPERTS) else Role.ATTENTION
    return quant_config_of(found).format_of(module, role) is None


@pytest.mark.parametrize("reads", [vllm_reads, sglang_reads, as_it_is])
@pytest.mark.parametrize("quantization", [None, "text", {"quant_method": "w4afp8"}])
def test_what_they_know_nothing_of_is_taken_as_it_is(reads: Reads, quantization: Any) -> None:
    assert read(reads, quantization)["quantization_config"] == quantization


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_vllm_finds_linears_by_their_tensors_but_no_experts(method: str) -> None:
    quantization = METHODS[method].config
    stored = (f"{OWN}.weight", f"{EXPERT}.weight")
    assert is_left_out(vllm_reads, quantization, OWN, *stored)
    assert not is_left_out(vllm_reads, quantization, EXPERT, *stored)
    assert not is_left_out(vllm_reads, quantization, OWN)


def test_vllm_looks_at_gptqs_tensors_whatever_dynamic_says() -> None:
    quantization = METHODS["gptq"].config | {"dynamic": {"-:.*mlp.*": {}}}
    assert is_left_out(vllm_reads, quantization, OWN, f"{OWN}.weight")
    listed = quantization | {"modules_in_block_to_quantize": [["self_attn.o_proj"]]}
    assert not is_left_out(vllm_reads, listed, OWN, f"{OWN}.weight")
    other = f"{LAYER}.self_attn.q_proj"
    assert is_left_out(vllm_reads, listed, other) and not is_left_out(sglang_reads, listed, other)


REFUSED = {
    "GPTQ, asymmetric": (vllm_reads, METHODS["gptq, asymmetric"].config, "sym false"),
    "GPTQ, permuted": (vllm_reads, METHODS["gptq, permuted"].config, "desc_act true"),
    "AutoRound": (vllm_reads, METHODS["auto-round, attention unquantized"].config, "auto_round"),
    "no list": (vllm_reads, COMPRESSED | {"ignore": None}, "ignore null"),
    "ModelOpt": (vllm_reads, MODELOPT | {"ignore": None}, "ignore null"),
    "integers": (vllm_reads, INTEGERS, "without input_activations"),
    "zero points": (
        *(vllm_reads, METHODS["compressed-tensors, zero points"].config),
        "symmetric false",
    ),
    "GPTQ in SGLang": (sglang_reads, METHODS["gptq v2"].config, "sym false"),
    "AutoRound in SGLang": (
        *(sglang_reads, METHODS["auto-round, attention unquantized"].config),
        "packing_format auto_round",
    ),
    "no list in SGLang": (sglang_reads, COMPRESSED | {"ignore": None}, "ignore null"),
    "NVFP4 in SGLang": (sglang_reads, MODELOPT | {"ignore": None}, "ignore null"),
    "ModelOpt's own file": (
        *(vllm_reads, {"quant_method": "modelopt", "quantization": {"exclude_modules": None}}),
        "exclude_modules null",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_does_not_load(name: str) -> None:
    reads, quantization, found = REFUSED[name]
    with pytest.raises(UnsupportedError, match=r"0\.32\.0|0\.5\.23") as refused:
        read(reads, quantization)
    assert found in str(refused.value)


ACCEPTED = {
    "GPTQ, permuted, whole rows": (
        *(vllm_reads, METHODS["gptq, permuted"].config | {"group_size": -1}),
    ),
    "GPTQ, permuted, in SGLang": (sglang_reads, METHODS["gptq, permuted"].config),
    "integers in SGLang": (sglang_reads, INTEGERS),
    "ModelOpt's fp8 in SGLang": (sglang_reads, MODELOPT | {"quant_algo": "FP8", "ignore": None}),
    "fp8 as others name it": (
        *(vllm_reads, METHODS["auto-round"].config | {"data_type": "fp", "packing_format": "x"}),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_one_of_them_loads(name: str) -> None:
    reads, quantization = ACCEPTED[name]
    read(reads, quantization)


def test_sglang_asks_no_rule_for_gptqs_experts() -> None:
    quantization = METHODS["gptq"].config | {"dynamic": {f"-:{LAYER}.*": {}}}
    assert is_left_out(sglang_reads, quantization, OWN)
    rules = read(sglang_reads, quantization)["quantization_config"]
    assert quant_config_of(rules).format_of(EXPERTS, Role.ROUTED_EXPERT) is not None
    with pytest.raises(InvalidInputError, match="every expert of a GPTQ model quantized"):
        read(sglang_reads, quantization, f"{EXPERT}.weight")
    read(sglang_reads, quantization, "model.layers.1.mlp.experts.0.up_proj.weight")


def test_names_in_auto_rounds_list() -> None:
    """vLLM takes one for the end of a name, and looks for a pattern anywhere in a name; SGLang
    wants the whole name for both."""
    plain = {"bits": 16, "data_type": "float"}
    by_end = METHODS["auto-round"].config | {"extra_config": {"self_attn.o_proj": plain}}
    assert is_left_out(vllm_reads, by_end, OWN) and not is_left_out(sglang_reads, by_end, OWN)
    inside = METHODS["auto-round"].config | {"extra_config": {r"layers\.3\.": plain}}
    assert is_left_out(vllm_reads, inside, OWN) and not is_left_out(sglang_reads, inside, OWN)
    for key in (OWN, r".*layers\.3\..*"):
        quantization = METHODS["auto-round"].config | {"extra_config": {key: plain}}
        assert is_left_out(vllm_reads, quantization, OWN)
        assert is_left_out(sglang_reads, quantization, OWN)


def test_vllm_compares_whole_names_of_fp8() -> None:
    for key in ("ignored_layers", "modules_to_not_convert"):
        quantization = METHODS["fp8"].config | {key: [LAYER, EXPERTS]}
        assert not is_left_out(vllm_reads, quantization, OWN)
        assert is_left_out(sglang_reads, quantization, OWN)
        assert is_left_out(vllm_reads, quantization, EXPERT)
        assert is_left_out(vllm_reads, quantization | {key: [OWN]}, OWN)
        assert is_left_out(vllm_reads, quantization | {key: [PROJECTION]}, PROJECTION)
        assert not is_left_out(vllm_reads, quantization | {key: ["mlp.experts"]}, EXPERT)
    both = {"ignored_layers": ["lm_head"], "modules_to_not_convert": [OWN]}
    assert not is_left_out(vllm_reads, METHODS["fp8"].config | both, OWN)


@pytest.mark.parametrize("model_type", ["nemotron_h_omni", "hy_v4", "mimo_v2_flash", "dots3_note"])
def test_vllm_takes_experts_of_any_name_for_one(model_type: str) -> None:
    config = SMALL_CONFIGS[model_type]
    specs = family_of(config).tensors.values()
    of_experts = [spec.name for spec in specs if spec.role is Role.ROUTED_EXPERT]
    listed = [name.partition(".experts.")[0] + ".experts" for name in of_experts]
    quantization = METHODS["fp8"].config | {"modules_to_not_convert": listed}
    found = vllm_reads({**config, "quantization_config": quantization}, ())
    assert found["quantization_config"]["modules_to_not_convert"] == listed


@pytest.mark.parametrize("nested", [False, True])
def test_parts_of_names_in_modelopts_list(nested: bool) -> None:
    """Reach no module of SGLang's; whole names, patterns and components of a linear's name do, and
    of experts the whole name alone."""

    def config(entry: str) -> dict[str, Any]:
        if nested:
            own = {"quant_algo": "FP8", "exclude_modules": [entry]}
            return {"quant_method": "modelopt", "quantization": own}
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [entry]}

    own, expert, experts = (one.replace(LAYER, DRAFT) for one in (OWN, EXPERT, EXPERTS))
    for entry, module in (
        ("mlp.experts", EXPERT),
        (EXPERT, EXPERT),
        ("self_attn.o_p", OWN),
        (LAYER, EXPERT),
    ):
        assert is_left_out(vllm_reads, config(entry), module)
        entry, module = (one.replace(LAYER, DRAFT) for one in (entry, module))
        assert not is_left_out(sglang_reads, config(entry), module)
    for entry in (own, DRAFT, f"{DRAFT}*", "self_attn", "decoder.self_attn", "*.self_attn.*"):
        assert is_left_out(sglang_reads, config(entry), own)
    for entry in (OWN, LAYER, "3.self_attn"):
        assert not is_left_out(sglang_reads, config(entry), own)
    assert is_left_out(sglang_reads, config(experts), expert)


def test_vllm_finds_a_head_by_its_name_alone() -> None:
    (group,) = COMPRESSED["config_groups"].values()
    named = {**group, "targets": ["Linear", r"re:.*shared_head\.head$"]}
    for quantization, is_quantized in (
        (COMPRESSED, False),
        ({**COMPRESSED, "config_groups": {"group_0": named}}, True),
    ):
        found = quant_config_of(read(vllm_reads, quantization)["quantization_config"])
        head = found.format_of(f"{LAYER}.shared_head.head", Role.HEAD)
        assert (head is not None) is is_quantized
    broken = read(vllm_reads, COMPRESSED | {"config_groups": None})["quantization_config"]
    assert broken["ignore"] == COMPRESSED["ignore"]


def test_a_head_is_a_linear_of_modelopt() -> None:
    config = quant_config_of(MODELOPT)
    assert config.format_of("lm_head", Role.HEAD) is None
    assert config.format_of(f"{LAYER}.shared_head.head", Role.HEAD) is not None


@pytest.mark.parametrize(
    ("method", "renamed"),
    [("compressed-tensors", True), ("fp8", True), ("modelopt", True), ("awq", False)],
)
def test_sglang_renames_where_a_config_class_of_its_can(method: str, renamed: bool) -> None:
    listed = {"ignore": ["model.layers.61.mlp"], "names": {"a.model.layers.61": 1}}
    config = {"quantization_config": {"quant_method": method, **listed}}
    found = with_renamed_entries(config, sglang_deepseek("model.layers.61"))
    wanted = {"ignore": ["model.decoder.mlp"], "names": {"a.model.decoder": 1}}
    assert found["quantization_config"] == {"quant_method": method} | (
        wanted if renamed else listed
    )


@pytest.mark.parametrize(
    ("entry", "module", "by_sglang", "by_transformers"),
    [
        ("mtp", "model.language_model.mtp.layers.0.mlp.up_proj", True, False),
        ("mtp", "mtp.layers.0.mlp.up_proj", True, True),
        ("mlp.down_proj", "model.layers.3.mlp.down_proj", False, True),
        ("down_proj", "model.layers.3.mlp.down_proj", True, True),
        ("up_proj", "model.layers.3.mlp.up_proj", False, True),  # asked for with gate_proj
        ("model.layers.3.mlp.up_proj", "model.layers.3.mlp.up_proj", False, True),
        ("model.layers.3.mlp.gate_up_proj", "model.layers.3.mlp.up_proj", True, False),
        ("gate", "model.layers.3.mlp.shared_expert_gate", False, True),
        (r"model\.layers\.[34]", "model.layers.3.mlp.up_proj", False, True),
        ("model.layers.3", "model.layers.3.mlp.up_proj", True, True),
        ("model.layers.3", "model.layers.31.mlp.up_proj", False, False),
        ("mlp.up_proj", "model.layers.3.mlp.up_proj", False, True),
    ],
)
def test_entries_of_bitsandbytes(
    entry: str, module: str, by_sglang: bool, by_transformers: bool
) -> None:
    """transformers takes patterns and ends of names, SGLang components and beginnings, of the names
    of linears that it joins."""
    listed = {"load_in_4bit": True, "llm_int8_skip_modules": [entry]}
    quantization = {"quant_method": "bitsandbytes", **listed}
    assert is_left_out(sglang_reads, quantization, module) is by_sglang
    assert is_left_out(as_it_is, quantization, module) is by_transformers


def test_sglang_takes_no_list_for_gates_and_experts_of_bitsandbytes() -> None:
    config = SMALL_CONFIGS["deepseek_v32"]
    layer = f"model.layers.{config['num_hidden_layers']}"
    heads, expert = f"{layer}.self_attn.indexer.weights_proj", f"{layer}.mlp.experts.0.up_proj"
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}

    def read(*names: str, **fields: Any) -> dict[str, Any]:
        return sglang_reads(config | {"quantization_config": quantization | fields}, names)

    for names, is_plain in (((), False), ((f"{heads}.weight",), True)):
        found = quant_config_of(read(*names)["quantization_config"])
        assert (found.format_of(heads, Role.INDEXER_HEADS) is None) is is_plain
    coded = (f"{expert}.weight", f"{expert}.weight.absmax")
    assert read(*coded)
    for refused in (lambda: read(coded[0]), lambda: read(*coded, load_in_8bit=True)):
        with pytest.raises(UnsupportedError, match=r"SGLang 0\.5\.23 does not load"):
            refused()


def test_a_broken_pattern_of_bitsandbytes_is_named() -> None:
    listed = {"load_in_8bit": True, "llm_int8_skip_modules": ["layers.(3"]}
    with pytest.raises(InvalidInputError, match=r"llm_int8_skip_modules") as raised:
        quant_config_of({"quant_method": "bitsandbytes", **listed})
    assert raised.value.found == "'layers.(3'"
