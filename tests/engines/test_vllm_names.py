"""The names by which vLLM's own classes of drafts ask a quantization config for the linears of a
family, and the entries of lists that reach them: those that `verify` goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import process
from family_drafts import VLLM
from test_resolvers import FUSED
from test_sglang_names import names_of

from cases import export
from faults.small_model import family_config, write_dense
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.method import modules_of
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.native import NATIVE_FP8, quantization_of
from mtp_checkpoints.quantization.readers import vllm_reads, with_renamed_entries
from runtime.checkpoints import EXAMPLES, changed

# Not compared: classes that ask nothing here, or by names that lists are renamed to.
OTHERS = ("deepseek_v4", "hy_v4", "glm5_next", "nemotron_h", "nemotron_h_puzzle")
OTHERS += ("nemotron_h_omni", "qwen4_exp", "qwen4_exp_text")
READERS = {name: reader for name, reader in VLLM.items() if name not in OTHERS}
OF_SGLANG = "fused_qkv_a_proj_with_mqa"
NVFP4 = "modelopt_fp4"
# Not followed: linears that classes ask for by names of which no entry of the parts' names is for,
# all of a model whose main model's class puts a word before entries.
NOT_FOLLOWED = {
    "pangu_ultra_moe": ("model.layers.3.self_attn.fused_qkv_a_proj",),
    "MiMoV2OmniForCausalLM": ("model.mtp.layers.0.mlp.gate_up_proj",),
    "bailing_moe_v3_vl": ("model.layers.4.",),
    "dots3_note": ("model.layers.3.",),
}
ENDS = ("o_proj", "dense", "down_proj", "kv_b_proj", "eh_proj", "experts")

Answers = dict[str, dict[str, bool | None]]


def config_of(model_type: str) -> dict[str, Any]:
    return changed(family_config(model_type), **READERS[model_type].fields)


def listed(family: ModelSpec) -> dict[str, list[str]]:
    """Lists: the linears by the names of their tensors, and ends of these."""
    own = (spec for spec in family.mtp_tensors.values() if spec.is_linear_or_projection)
    return {"names": modules_of(own), "ends": [*ENDS]}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder, job = tmp_path_factory.mktemp("families"), dict[str, object]()
    for model_type in READERS:
        config = config_of(model_type)
        source = write_dense(folder / model_type, config=config | dict(EXAMPLES[model_type].whole))
        bundle = folder / f"{model_type}-bundle"
        made = export(source, bundle, "--target", "vllm", "--quiet")
        assert made.code == 0, made.err
        places = {"main": str(bundle / "main"), "draft": str(bundle / "mtp")}
        for name, entries in listed(family_of(config)).items():
            job[f"{model_type} {name}"] = places | {"kind": "fp8", "entries": entries}
        job[f"{model_type} {NVFP4}"] = places | {"kind": NVFP4, "entries": []}
    script = Path(__file__).with_name("vllm_names.py")
    status, log, result = process(script, job, tmp_path_factory.mktemp("job"))
    assert status == 0, log[-3000:]
    found: Answers = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("model_type", READERS)
def test_names_are_those_of_vllm(model_type: str, answers: Answers) -> None:
    family = family_of(config_of(model_type))
    layers = [module.layer.prefix for module in family.mtp]
    gates = {
        family.vllm.name_of(layers, spec.module)
        for spec in family.mtp_tensors.values()
        if spec.role is Role.DELTA_GATES
    }
    plain = {f"{layers[0]}.{one}" for one in family.vllm.plain}
    wanted = names_of(family, family.vllm, OF_SGLANG) - plain | gates
    assert answers[f"{model_type} names"].keys() == wanted


@pytest.mark.parametrize("model_type", READERS)
def test_projections_beside_nvfp4(model_type: str, answers: Answers) -> None:
    family = family_of(config_of(model_type))
    own = family.mtp[0].modules.projection
    asked = (family.vllm.projection or own) in answers[f"{model_type} {NVFP4}"]
    assert asked == (family.vllm.projection is not None and family.vllm.projection_in_nvfp4)


@pytest.mark.parametrize("kind", ["names", "ends"])
@pytest.mark.parametrize("model_type", READERS)
def test_entries_that_act(model_type: str, kind: str, answers: Answers) -> None:
    config = config_of(model_type)
    family = family_of(config)
    quantization = NATIVE_FP8 | {"modules_to_not_convert": listed(family)[kind]}
    whole = config | {"quantization_config": quantization}
    read = quant_config_of(
        quantization_of(vllm_reads(with_renamed_entries(whole, family.vllm), ()))
    )

    def left_out(name: str) -> bool:
        parent, _, last = name.rpartition(".")
        role = Role.ROUTED_EXPERT if last == "experts" else Role.ATTENTION
        parts = [f"{parent}.{part}" for part in FUSED.get(last, (last,))]
        if model_type.startswith(("mimo_v2", "MiMoV2")) and name in listed(family)["names"]:
            parts = [name]  # stored as one
        return all(read.format_of(part, role) is None for part in parts)

    answer = answers[f"{model_type} {kind}"]
    others = NOT_FOLLOWED.get(model_type, ()) if kind == "names" else ()
    assert all(not answer[name] for name in answer if name.startswith(others))
    answer = {name: one for name, one in answer.items() if not name.startswith(others)}
    assert {name: left_out(name) for name in answer} == answer
