"""The names by which SGLang's own classes of drafts ask a quantization config for the linears of a
family, and beside which configs they ask for none: those that `verify` goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import process, sglang_wheel
from family_drafts import SGLANG
from test_resolvers import FUSED

from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.engine_draft import EngineDraft
from mtp_checkpoints.families.examples import Reader
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from runtime.checkpoints import SMALL_CONFIGS

OF_MIMO = {"layernorm_epsilon": 1e-5, "sliding_window_size": 32, "attention_bias": False}
OF_MIMO |= {f"swa_num_{heads}": 2 for heads in ("attention_heads", "key_value_heads")}
OF_MIMO |= {"swa_head_dim": 16}
OF_QWEN = {"layers_block_type": ["attention"], "full_attention_interval": 1}
# Those whose tensors are not loaded there, because a class needs more than stand-ins for it.
READERS = SGLANG | {
    "mimo_v2": Reader("MiMoV2MTP", OF_MIMO, module="mimo_v2_nextn"),
    "mimo_v2_flash": Reader("MiMoV2MTP", OF_MIMO, module="mimo_v2_nextn"),
    "qwen3_next": Reader("Qwen3NextForCausalLMMTP", OF_QWEN, module="qwen3_next_mtp"),
}
OF_VLLM = "fused_qkv_a_proj"  # what it calls linears that SGLang joins under another name
KINDS = ("fp8", "modelopt_fp4")
BESIDE = "a.model.layers.{}.attention.dense"  # an entry that some classes rename


def config_of(model_type: str) -> dict[str, Any]:
    """A small config with the fields that SGLang's class reads, those of its text above all."""
    config = SMALL_CONFIGS[model_type]
    text = config.get("text_config", {})
    return {key: one for key, one in config.items() if key != "text_config"} | text


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    job: dict[str, object] = {}
    for model_type, reader in READERS.items():
        config = config_of(model_type) | dict(reader.fields)
        entries = [BESIDE.format(family_of(SMALL_CONFIGS[model_type]).mtp_layers.start)]
        for kind in KINDS:
            asked = {"module": reader.module, "name": reader.name, "config": config}
            job[f"{model_type} {kind}"] = asked | {"kind": kind, "renamed": entries}
    script = Path(__file__).with_name("sglang_names.py")
    job["wheel"] = str(sglang_wheel())
    status, log, result = process(script, job, tmp_path_factory.mktemp("job"))
    assert status == 0, log[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


def names_of(family: ModelSpec, draft: EngineDraft, left: str) -> set[str]:
    """The names that the family's linears should be asked for by: of the first MTP layer. left:
    that of linears which the engine joins under another one."""
    layers = [module.layer.prefix for module in family.mtp]
    found = set[str]()
    first = family.mtp_layers.start
    for spec in family.mtp_tensors.values():
        if spec.is_linear_weight and spec.mtp_layer == first:
            module = draft.name_of(layers, spec.module)
            if EXPERTS in spec.name:
                module = module.partition(EXPERTS)[0] + EXPERTS.rstrip(".")
            found.add(module)
    for joined, parts in FUSED.items():
        if joined == left:
            continue
        for parent in {name[: -len(parts[0])] for name in found if name.endswith(parts[0])}:
            own = {f"{parent}{part}" for part in parts}
            if own <= found:
                found = found - own | {f"{parent}{joined}"}
    projection = family.mtp[0].modules.projection
    if projection and draft.projection is not None:
        found.add(draft.projection or projection)
    return found


@pytest.mark.parametrize("model_type", READERS)
def test_names_are_those_of_sglang(model_type: str, answers: dict[str, dict[str, Any]]) -> None:
    family = family_of(SMALL_CONFIGS[model_type])
    answer = answers[f"{model_type} fp8"]
    assert answer["asked"] == (
        sorted(names_of(family, family.sglang, OF_VLLM)) if family.sglang.by_config else []
    )


@pytest.mark.parametrize("model_type", READERS)
def test_beside_nvfp4(model_type: str, answers: dict[str, dict[str, Any]]) -> None:
    draft = family_of(SMALL_CONFIGS[model_type]).sglang
    answer = answers[f"{model_type} modelopt_fp4"]
    assert bool(answer["asked"]) is (draft.beside_nvfp4 and draft.by_config)
    assert answer["asked"] or answer["plain"]


@pytest.mark.parametrize("model_type", [name for name in READERS if name != "deepseek_v3"])
def test_entries_that_are_renamed(model_type: str, answers: dict[str, dict[str, Any]]) -> None:
    """But of DeepSeek's class, which renames model.layers.61 alone, as its releases have it."""
    family, answer = family_of(SMALL_CONFIGS[model_type]), answers[f"{model_type} fp8"]
    entry = BESIDE.format(family.mtp_layers.start)
    assert answer["renamed"] == [family.sglang.entry_of(entry)]
