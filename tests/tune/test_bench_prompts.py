"""Prompts of the benchmark of tuning: none has much of a held-out one."""

from __future__ import annotations

import pytest

from benchmarks.bench_tune import (
    COMMON_TOKENS,
    held_out_prompts,
    training_prompts,
    without_common,
)


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
