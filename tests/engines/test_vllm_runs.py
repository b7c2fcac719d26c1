"""vLLM on a CPU runs our exports, main and MTP in separate folders: what it writes is what our
runtime would write but for ties, and it accepts as many drafts as our runtime does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparison import check_acceptance, check_log, check_text, compare
from engine_runs import (
    Outputs,
    Prompts,
    bundle_of,
    dequantized_draft,
    quantized_draft,
    read_with_ours,
    run_vllm,
    vllm_job,
)

DRAFTS = [0, 1, 2, 3]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_vllm_writes_what_ours_would_and_accepts_as_many(
    drafts: int,
    bf16: Path,
    prompts: Prompts,
    sound_run: Callable[[int], tuple[Outputs, str]],
    figures: dict[str, Any],
) -> None:
    outputs, log = sound_run(drafts)
    measured = compare(outputs, read_with_ours(bf16, drafts, prompts, outputs.tokens))
    figures[f"{drafts}"] = measured.as_json()
    check_text(measured)
    check_acceptance(measured)
    check_log(log)


@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4"])
def test_a_draft_that_was_quantized(
    scheme: str, bf16: Path, prompts: Prompts, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """What quantizing the draft costs in acceptance is the same in vLLM and in ours."""
    quantized = quantized_draft(bf16, tmp_path / "quantized", scheme)
    draft = dequantized_draft(quantized, tmp_path / "draft")
    bundle = bundle_of(tmp_path / "bundle", bf16 / "main", draft)
    outputs, log = run_vllm(vllm_job(bundle, 2, prompts), tmp_path / "run")
    measured = compare(outputs, read_with_ours(bundle, 2, prompts, outputs.tokens))
    figures[f"2, draft through {scheme.removeprefix('weight_only_')}"] = measured.as_json()
    check_text(measured)
    check_acceptance(measured)
    check_log(log)
