"""Data of the benchmark of tuning: no prompt has much of a held-out one, and rows are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.common.tiny_prompts import (
    COMMON_TOKENS,
    held_out_prompts,
    training_prompts,
    without_common,
)
from benchmarks.common.tiny_target import TinyWriter, read_target
from cases import export
from mtp_checkpoints.families.eagle3 import usual_taps
from mtp_export.tune.rows import Fed, Line, Writer
from mtp_runtime.models.load import LoadOptions, load_model
from tune.conftest import DEEPSEEK


def runs(tokens: list[int]) -> set[str]:
    words = [f"{token}," for token in tokens]
    return {"".join(words[i : i + COMMON_TOKENS]) for i in range(len(words) - COMMON_TOKENS + 1)}


def test_prompts_with_a_run_of_others_are_left_out() -> None:
    held_out = [list(range(100, 140)), list(range(500, 500 + COMMON_TOKENS))]
    kept = [list(range(200, 240)), held_out[0][: COMMON_TOKENS - 1], [1, 2, 3]]
    leaking = [
        held_out[0],
        [7, 8, *held_out[0][5 : 5 + COMMON_TOKENS], 9],
        [*held_out[1], 3],
    ]
    assert without_common([*kept, *leaking], held_out) == kept


@pytest.mark.nightly
def test_the_prompts_have_no_run_of_the_held_out_ones() -> None:
    """They are those of as many modules, and nearly as many as asked for."""
    made = training_prompts(256)
    known = set().union(*map(runs, held_out_prompts()))
    assert not any(known & runs(prompt) for prompt in made)
    assert 0.9 * 256 < len(made) <= 256
    assert len({tuple(prompt) for prompt in made}) == len(made)


@pytest.mark.nightly
def test_rows_of_the_training_code_are_those_of_the_runtime(tmp_path: Path) -> None:
    """Answers, states, taps and distributions, also where the answers are known."""
    output = tmp_path / "bundle"
    assert export(DEEPSEEK, output, "--quiet").code == 0
    lines = [Line(tuple(prompt), None) for prompt in held_out_prompts()[:3]]
    taps = usual_taps(61)
    model = load_model(output, LoadOptions()).model.tapped(taps)
    for fed, own in ((Fed.AFTER_NORM, ()), (Fed.TAPS, taps)):
        writer = Writer(model.tapped(own), fed, new_tokens=24, text_tokens=400)
        wanted = writer.rows(lines, torch.float32)
        answers = {t.tokens[: t.prompt_size]: t.tokens[t.prompt_size :] for t in wanted.texts.texts}
        for known in ({}, answers):
            tiny = TinyWriter(read_target(output), fed, own, new_tokens=24, answers=known)
            found = tiny.rows(lines, torch.float32)
            assert found.texts == wanted.texts
            torch.testing.assert_close(found.hidden, wanted.hidden, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(found.log_probs, wanted.log_probs, atol=2e-3, rtol=2e-3)
