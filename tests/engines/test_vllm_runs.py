"""vLLM on a CPU runs our exports, main and MTP in separate folders: what it writes is what our
runtime would write but for ties, and it accepts as many drafts as our runtime does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from engine_runs import (
    Outputs,
    Prompts,
    Reading,
    bundle_of,
    dequantized_draft,
    quantized_draft,
    read_with_ours,
    run_vllm,
    vllm_job,
)

# Of log-probabilities: more between two engines in bf16 than all but 1 % of what was ever measured.
LARGEST_NOISE = 0.5
# What vLLM logs of weights that it misses, did not expect or left as they were.
COMPLAINTS = re.compile(
    r".*(not initialized|not found in params|unexpected|missing|uninitiali[sz]ed|ignor\w+ weight"
    r"|skipp\w+ weight|no weight).*",
    re.I,
)
DRAFTS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def runs(
    bf16: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Outputs, str]]:
    """Outputs and log for plain decoding (0 drafts) and 1 to 3 drafts."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        drafts: run_vllm(
            vllm_job(bf16 / "main", bf16 / "mtp", drafts, prompts), folder / str(drafts)
        )
        for drafts in DRAFTS
    }


def disagreements(outputs: Outputs, reading: Reading) -> tuple[list[float], list[float]]:
    """By how much the two differ where ours would have written another token; and where both would
    write the same, the noise, of the margin between vLLM's best two."""
    differing: list[float] = []
    noise: list[float] = []
    for tokens, steps, rows in zip(outputs.tokens, outputs.logprobs, reading.logits, strict=True):
        for token, step, row in zip(tokens, steps, rows, strict=True):
            ours = torch.log_softmax(row, -1)
            best = int(ours.argmax())
            second = next(other for other in step if other != token)
            if best == token:
                theirs = step[token] - step[second]
                noise.append(abs(theirs - float(ours[token] - ours[second])))
            else:  # where vLLM does not even name our best, its margin is above that to its second
                theirs = step[token] - step.get(best, step[second])
                differing.append(float(ours[best] - ours[token]) + theirs)
    return differing, noise


def check_text(outputs: Outputs, reading: Reading) -> None:
    """Every token that ours would not have written is a tie: the engines' noise decides it."""
    differing, noise = disagreements(outputs, reading)
    most, typical = max(noise), torch.tensor(noise).quantile(0.99).item()
    print(
        f"{len(differing)} tokens differ, by up to {max(differing, default=0):.3f};"
        f" {len(noise)} agree, noise {typical:.3f} (99 %), {most:.3f} (most)"
    )
    assert typical < LARGEST_NOISE
    assert max(differing, default=0.0) <= most
    assert len(differing) < 0.1 * len(noise)


def check_acceptance(outputs: Outputs, reading: Reading) -> None:
    """Per position within 3 points, on the same text."""
    print("vLLM", outputs.acceptance, "ours", reading.acceptance, "blocks", outputs.blocks)
    assert len(outputs.acceptance) == len(reading.acceptance)
    for theirs, ours in zip(outputs.acceptance, reading.acceptance, strict=True):
        assert abs(theirs - ours) <= 0.03


@pytest.mark.parametrize("drafts", DRAFTS)
def test_vllm_writes_what_ours_would_and_accepts_as_many(
    drafts: int, bf16: Path, prompts: Prompts, runs: dict[int, tuple[Outputs, str]]
) -> None:
    outputs, log = runs[drafts]
    reading = read_with_ours(bf16, drafts, prompts, outputs.tokens)
    check_text(outputs, reading)
    check_acceptance(outputs, reading)
    assert not [line for line in log.splitlines() if COMPLAINTS.match(line)]


@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4"])
def test_a_draft_that_was_quantized(
    scheme: str, bf16: Path, prompts: Prompts, tmp_path: Path
) -> None:
    """What quantizing the draft costs in acceptance is the same in vLLM and in ours."""
    quantized = quantized_draft(bf16, tmp_path / "quantized", scheme)
    draft = dequantized_draft(quantized, tmp_path / "draft")
    outputs, log = run_vllm(vllm_job(bf16 / "main", draft, 2, prompts), tmp_path / "run")
    bundle = bundle_of(tmp_path / "bundle", bf16 / "main", draft)
    reading = read_with_ours(bundle, 2, prompts, outputs.tokens)
    check_text(outputs, reading)
    check_acceptance(outputs, reading)
    assert not [line for line in log.splitlines() if COMPLAINTS.match(line)]
