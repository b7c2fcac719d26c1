"""vLLM on a CPU runs our exports, in bf16 and (with AMX) in fp8, main and MTP in separate folders:
what it writes is what our runtime would write but for ties, and it accepts as many drafts as our
runtime does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
from whole_tiles import write_whole_tiles

from cases import export

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


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("model_type", ["glm4_moe", "glm4_moe_lite"])
def test_other_families(
    model_type: str,
    drafts: int,
    family_bundle: Callable[[str], Path],
    prompts: Prompts,
    tmp_path: Path,
    figures: dict[str, Any],
) -> None:
    """The same of grouped-query attention, and of GLM's layers around latent attention."""
    bundle = family_bundle(model_type)
    outputs, log = run_vllm(vllm_job(bundle, drafts, prompts), tmp_path / "run")
    measured = compare(outputs, read_with_ours(bundle, drafts, prompts, outputs.tokens))
    figures[f"{model_type}, {drafts}"] = measured.as_json()
    check_text(measured)
    check_acceptance(measured)
    check_log(log)


@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4"])
def test_a_draft_that_was_quantized(
    scheme: str, bf16: Path, prompts: Prompts, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """Quantizing the draft costs the same acceptance in vLLM as in ours."""
    quantized = quantized_draft(bf16, tmp_path / "quantized", scheme)
    draft = dequantized_draft(quantized, tmp_path / "draft")
    bundle = bundle_of(tmp_path / "bundle", bf16 / "main", draft)
    outputs, log = run_vllm(vllm_job(bundle, 2, prompts), tmp_path / "run")
    measured = compare(outputs, read_with_ours(bundle, 2, prompts, outputs.tokens))
    figures[f"2, draft through {scheme.removeprefix('weight_only_')}"] = measured.as_json()
    check_text(measured)
    check_acceptance(measured)
    check_log(log)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's fp8 kernels for CPUs need AMX"
)
@pytest.mark.parametrize("drafts", [0, 2])
def test_the_fp8_export_as_it_is(
    drafts: int, prompts: Prompts, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """Weights in fp8 blocks in both parts, activations in bf16 on a CPU, in vLLM as in ours."""
    source, bundle = write_whole_tiles(tmp_path / "source"), tmp_path / "bundle"
    assert export(source, bundle, "--target", "vllm", "--quiet").code == 0
    outputs, log = run_vllm(vllm_job(bundle, drafts, prompts), tmp_path / "run")
    assert "Using CPU Fp8 MoE backend" in log
    measured = compare(outputs, read_with_ours(bundle, drafts, prompts, outputs.tokens))
    figures[f"{drafts}, fp8 as exported"] = measured.as_json()
    check_text(measured)
    check_acceptance(measured)
    check_log(log)
