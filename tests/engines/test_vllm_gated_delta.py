"""vLLM on a CPU runs Qwen3.5's main model, whose layers are gated delta nets: what it writes is
what our runtime would write but for ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparison import check_log, check_text, compare
from engine_runs import (
    DELTA_FIXTURE,
    ROOT,
    read_prompts,
    read_with_ours,
    run_vllm,
    vllm_job,
)
from wide_heads import write_wide_heads

from cases import export


def test_vllm_writes_what_ours_would(tmp_path: Path, figures: dict[str, Any]) -> None:
    bundle = tmp_path / "bundle"
    outcome = export(write_wide_heads(tmp_path / "wide"), bundle, "--target", "vllm", "--quiet")
    assert outcome.code == 0, outcome.err
    prompts = read_prompts(ROOT / "fixtures/prompts.jsonl", DELTA_FIXTURE / "tokenizer.json", 16)
    outputs, log = run_vllm(vllm_job(bundle, 0, prompts), tmp_path / "run")
    measured = compare(outputs, read_with_ours(bundle, 0, prompts, outputs.tokens))
    figures["qwen3_5_text, 0"] = measured.as_json()
    check_text(measured)
    check_log(log)
