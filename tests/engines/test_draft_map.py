"""Every model that vLLM or SGLang takes for one with an MTP module has a row in docs/models.md."""

from __future__ import annotations

import json
from pathlib import Path

from engine_runs import process, sglang_wheel

from mtp_checkpoints.families import FAMILIES, SEPARATE_DRAFTS, family_of
from mtp_checkpoints.families.without_mtp import WITHOUT_MTP
from runtime.checkpoints import SMALL_CONFIGS

ROWS = {*FAMILIES, *WITHOUT_MTP, *SEPARATE_DRAFTS}
# A part of EXAONE-4.5's config, and vLLM's own name of a draft.
NO_MODELS = {"exaone4_5_vision", "minimax_m3_mtp"}
# Architectures of models that have a row, which the small configs do not have.
OTHERS = {
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
}
# The same of SGLang's rewriting.
OF_SGLANG = OTHERS | {
    "ExaoneMoEForCausalLM": "exaone_moe",
    "HYV4ForCausalLM": "hy_v4",
}
# Classes of transformers, under whose names nothing is released.
UNRELEASED = {"BailingHybridForCausalLM", "Qwen4ExpForCausalLM"}
BY_CONFIG = {"Dots3NoteForCausalLM"}  # SGLang knows it by the class of its config
EAGLE = {"MistralLarge3ForCausalLM"}  # a draft of its own, and no MTP module


def test_every_model_of_vllms_map_has_a_row(tmp_path: Path) -> None:
    script = Path(__file__).with_name("vllm_draft_map.py")
    status, log, result = process(script, {"types": sorted(ROWS)}, tmp_path)
    assert status == 0, log[-3000:]
    found = json.loads(result.read_text())
    assert {"deepseek_v3", "nemotron_h_puzzle", "hy_v4"} <= set(found["types"])
    assert set(found["types"]) <= ROWS | NO_MODELS
    ours = {name for config in SMALL_CONFIGS.values() for name in config["architectures"]}
    assert set(OTHERS.values()) <= ROWS
    assert set(found["architectures"]) <= ours | OTHERS.keys() | EAGLE


def test_every_model_that_sglang_rewrites_has_a_row(tmp_path: Path) -> None:
    """And of those that run, SGLang has the drafts that their families name it for."""
    ours = {name for config in SMALL_CONFIGS.values() for name in config["architectures"]}
    job = {"wheel": str(sglang_wheel()), "architectures": sorted(ours)}
    script = Path(__file__).with_name("sglang_draft_map.py")
    status, log, result = process(script, job, tmp_path)
    assert status == 0, log[-3000:]
    made = json.loads(result.read_text())
    rewritten = {name for name, draft in made.items() if draft != name}
    assert set(OF_SGLANG.values()) <= ROWS
    assert rewritten <= ours | OF_SGLANG.keys()
    told = {
        name
        for config in SMALL_CONFIGS.values()
        if "sglang" in family_of(config).engines
        for name in config["architectures"]
    }
    assert told - UNRELEASED - BY_CONFIG <= rewritten
