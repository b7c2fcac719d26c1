"""Every model that vLLM takes for one with an MTP module has a row in docs/models.md."""

from __future__ import annotations

import json
from pathlib import Path

from engine_runs import process

from mtp_checkpoints.families import FAMILIES
from mtp_checkpoints.families.without_mtp import NOT_DESCRIBED, SEPARATE_DRAFTS, WITHOUT_MTP
from runtime.checkpoints import SMALL_CONFIGS

ROWS = {*FAMILIES, *WITHOUT_MTP, *SEPARATE_DRAFTS, *NOT_DESCRIBED}
# A part of EXAONE-4.5's config, and vLLM's own name of a draft.
NO_MODELS = {"exaone4_5_vision", "minimax_m3_mtp"}
# Architectures of models that have a row, which the small configs do not have.
OTHERS = {
    "BailingMoeV2_5ForCausalLM": "bailing_hybrid",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "BailingMoeV3VLForConditionalGeneration": "bailing_hybrid",
    "MiMoV2OmniForCausalLM": "mimo_v2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl",
}
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
