"""Each acceptance rule on blocks computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.acceptance.base import Block, Draft, Verdict
from mtp_runtime.acceptance.exact import accept_best
from mtp_runtime.acceptance.relaxed import accept_relaxed
from mtp_runtime.acceptance.topp_window import accept_topp_window
from mtp_runtime.config import SpeculationConfig
from mtp_runtime.sampling import SamplingParams, SeededChoices, one_hot


class Best:
    """Draws the likeliest token and accepts what is likely."""

    def accept(self, probability: float) -> bool:
        return probability >= 0.5

    def draw(self, probabilities: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> int:
        return int(probabilities.argmax())


def block(
    drafts: tuple[int, ...], rows: list[list[float]], top_p: float = 0.7, **settings: float
) -> Block:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    return Block(
        Draft(drafts),
        np.array(rows),
        params,
        SpeculationConfig(**settings),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("drafts", "best", "expected"),
    [
        ([], [4], Verdict(0, 4)),
        ([1], [2, 3], Verdict(0, 2)),
        ([1], [1, 3], Verdict(1, 3)),
        ([1, 5, 6], [1, 2, 6, 7], Verdict(1, 2)),
        ([1, 2, 3], [1, 2, 3, 4], Verdict(3, 4)),
    ],
)
def test_greedy(drafts: list[int], best: list[int], expected: Verdict) -> None:
    assert accept_best(drafts, best) == expected


@pytest.mark.parametrize("rule", sorted(ACCEPTANCE_RULES))
def test_certain_targets_make_every_rule_greedy(rule: str) -> None:
    settings = SpeculationConfig(relaxed_margin=0.0)
    params = SamplingParams(temperature=1.0)
    blocks = [((1, 2), (1, 2, 3)), ((1, 0), (1, 2, 3)), ((0, 2), (1, 2, 3))]
    for drafts, best in [*blocks, ((0, 2, 3), (1, 2, 3, 0))]:
        asked = Block(Draft(drafts), one_hot(np.array(best), 4), params, settings)
        assert ACCEPTANCE_RULES[rule].accept(asked, SeededChoices(0)) == accept_best(drafts, best)


FLAT = [0.4, 0.35, 0.15, 0.1]  # at top_p 0.7 the candidates are tokens 0 and 1
SHARP = [0.8, 0.1, 0.06, 0.04]  # token 0 alone


def test_topp_window_takes_any_candidate() -> None:
    assert accept_topp_window(block((1,), [FLAT, SHARP]), Best()) == Verdict(1, 0)
    assert accept_topp_window(block((2,), [FLAT, SHARP]), Best()) == Verdict(0, 0)


def test_topp_window_caps_the_candidates() -> None:
    asked = block((1,), [FLAT, SHARP], max_candidate_len=1)
    assert accept_topp_window(asked, Best()) == Verdict(0, 0)


def test_topp_window_forgives_a_second_best_before_a_right_window() -> None:
    rows = [SHARP] * 5
    assert accept_topp_window(block((1, 0, 0, 0), rows), Best()) == Verdict(3, 0)
    assert accept_topp_window(block((1, 0, 2, 0), rows), Best()) == Verdict(0, 0)
    assert accept_topp_window(block((2, 0, 0, 0), rows), Best()) == Verdict(0, 0)
    assert accept_topp_window(block((1, 0), rows[:3]), Best()) == Verdict(0, 0)


def test_topp_window_may_end_with_the_last_draft() -> None:
    assert accept_topp_window(block((1, 0, 0), [SHARP] * 4), Best()) == Verdict(3, 0)


def test_relaxed_takes_near_misses() -> None:
    asked = block((1,), [FLAT, SHARP], relaxed_top_n=2, relaxed_margin=0.1)
    assert accept_relaxed(asked, Best()) == Verdict(1, 0)
    asked = block((1,), [SHARP, SHARP], relaxed_top_n=2, relaxed_margin=0.1)
    assert accept_relaxed(asked, Best()) == Verdict(0, 0)
