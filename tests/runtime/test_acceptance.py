"""Each acceptance rule on blocks computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.acceptance.base import Block, Draft, Verdict
from mtp_runtime.acceptance.exact import accept_best, accept_exact
from mtp_runtime.acceptance.relaxed import accept_relaxed
from mtp_runtime.acceptance.topp_window import accept_topp_window
from mtp_runtime.config import SpeculationConfig
from mtp_runtime.sampling import SamplingParams, SeededChoices, one_hot, probabilities_of


class Best:
    """Draws the likeliest token and accepts what is likely."""

    def accept(self, probability: float) -> bool:
        return probability >= 0.5

    def draw(self, probabilities: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> int:
        return int(probabilities.argmax())


class Script:
    """Gives the verdicts it was told, and notes what it was asked."""

    def __init__(self, *verdicts: bool) -> None:
        self._verdicts = iter(verdicts)
        self.asked: list[float] = []
        self.drawn: list[float] = []

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return next(self._verdicts)

    def draw(self, probabilities: np.ndarray[Any, np.dtype[np.float64]]) -> int:
        self.drawn = probabilities.tolist()
        return 7


def block(
    drafts: tuple[int, ...],
    rows: Sequence[list[float]],
    top_p: float = 0.7,
    draft_probs: list[list[float]] | None = None,
    **settings: float,
) -> Block:
    params = SamplingParams(temperature=1.0, top_p=top_p)
    return Block(
        Draft(drafts, None if draft_probs is None else np.array(draft_probs)),
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


HALVES = [0.5, 0.25, 0.25, 0.0]
PROPOSED = [[0.25, 0.5, 0.25, 0.0], [0.0, 0.125, 0.125, 0.75]]
LAST = [0.1, 0.2, 0.3, 0.4]


def test_exact_asks_for_the_ratio_of_target_and_draft() -> None:
    asked, script = block((1, 2), [HALVES, HALVES, LAST], draft_probs=PROPOSED), Script(True, True)
    assert accept_exact(asked, script) == Verdict(2, 7)
    assert script.asked == [0.5, 1.0], "0.25 / 0.5, and 0.25 / 0.125 at most 1"
    assert script.drawn == LAST


@pytest.mark.parametrize(
    ("verdicts", "accepted", "residual"),
    [((False,), 0, [1.0, 0.0, 0.0, 0.0]), ((True, False), 1, [2 / 3, 1 / 6, 1 / 6, 0.0])],
)
def test_exact_draws_what_the_draft_left_of_the_target(
    verdicts: tuple[bool, ...], accepted: int, residual: list[float]
) -> None:
    script = Script(*verdicts)
    asked = block((1, 2), [HALVES, HALVES, LAST], draft_probs=PROPOSED)
    assert accept_exact(asked, script) == Verdict(accepted, 7)
    assert script.drawn == pytest.approx(residual)


def test_exact_takes_a_draft_without_distribution_for_certain() -> None:
    script = Script(True, False)
    assert accept_exact(block((0, 1), [HALVES, HALVES, LAST]), script) == Verdict(1, 7)
    assert script.asked == [0.5, 0.25]
    assert script.drawn == pytest.approx([2 / 3, 0.0, 1 / 3, 0.0])


def test_exact_draws_from_the_target_where_rounding_leaves_nothing() -> None:
    script = Script(False)
    asked = block((1,), [HALVES, LAST], draft_probs=[HALVES])
    assert accept_exact(asked, script) == Verdict(0, 7)
    assert script.drawn == HALVES


def test_a_draft_of_nothing() -> None:
    assert Draft() == Draft((), None)


def test_judging_changes_no_distribution() -> None:
    for rule in ACCEPTANCE_RULES.values():
        asked = block((1, 2), [HALVES, HALVES, LAST], draft_probs=PROPOSED)
        rule.accept(asked, Script(False))
        assert asked.target_probs.tolist() == [HALVES, HALVES, LAST]
        assert asked.draft.draft_probs is not None
        assert asked.draft.draft_probs.tolist() == PROPOSED


def test_only_exact_judges_greedy_requests_by_tokens_alone() -> None:
    alone = {name: rule.accept_greedy for name, rule in ACCEPTANCE_RULES.items()}
    assert alone == {"exact": accept_best, "topp_window": None, "relaxed": None}


def test_topp_window_alone_is_given_the_tokens_past_top_p() -> None:
    logits = np.log(np.array([FLAT, SHARP], dtype=np.float32))
    params = SamplingParams(temperature=0.5, top_p=0.7, top_k=3)
    for name, rule in ACCEPTANCE_RULES.items():
        top_p = 1.0 if name == "topp_window" else 0.7
        expected = probabilities_of(logits, SamplingParams(temperature=0.5, top_p=top_p, top_k=3))
        assert rule.distribution(logits, params).tolist() == expected.tolist(), name


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


def test_topp_window_s_candidates_are_the_lower_of_many_equal_tokens() -> None:
    """As they are the better ones for every other rule."""
    row = [2.0 if token % 3 == 1 else 1.0 for token in range(4096)]
    rows = [[part / sum(row) for part in row]] * 2
    for token in (*range(16), *range(1384, 1390), 4095):
        asked = block((token,), rows, top_p=1.0, max_candidate_len=5)
        assert accept_topp_window(asked, Best()).accepted == int(token in (1, 4, 7, 10, 13))


def test_topp_window_forgives_a_second_best_before_a_right_window() -> None:
    rows = [SHARP] * 5
    assert accept_topp_window(block((1, 0, 0, 0), rows), Best()) == Verdict(3, 0)
    assert accept_topp_window(block((1, 0, 2, 0), rows), Best()) == Verdict(0, 0)
    assert accept_topp_window(block((1, 2, 0, 0), rows), Best()) == Verdict(0, 0)
    assert accept_topp_window(block((2, 0, 0, 0), rows), Best()) == Verdict(0, 0)
    assert accept_topp_window(block((1, 0), rows[:3]), Best()) == Verdict(0, 0)


def test_topp_window_s_window_may_end_with_the_block() -> None:
    assert accept_topp_window(block((1, 0, 0), [SHARP] * 4), Best()) == Verdict(3, 0)
    assert accept_topp_window(block((0, 1, 0, 0), [SHARP] * 5), Best()) == Verdict(4, 0)
    one = block((1, 0), [SHARP] * 3, verify_window=1)
    assert accept_topp_window(one, Best()) == Verdict(2, 0)


def test_topp_window_forgives_nothing_that_the_target_rules_out() -> None:
    certain = [1.0, 0.0, 0.0, 0.0]
    assert accept_topp_window(block((1, 0, 0), [certain] * 4), Best()) == Verdict(0, 0)


@pytest.mark.parametrize(
    ("drafts", "settings", "accepted", "drawn"),
    [
        ((2,), {}, 0, [0.4 / 0.75, 0.35 / 0.75, 0.0, 0.0]),
        ((0,), {}, 1, [1.0, 0.0, 0.0, 0.0]),
        ((2,), {"max_candidate_len": 1}, 0, [1.0, 0.0, 0.0, 0.0]),
        ((2,), {"top_p": 0.9}, 1, [0.8 / 0.9, 0.1 / 0.9, 0.0, 0.0]),
        ((2,), {"top_p": 1.0, "max_candidate_len": 2}, 0, [0.4 / 0.75, 0.35 / 0.75, 0.0, 0.0]),
    ],
)
def test_topp_window_draws_from_the_candidates(
    drafts: tuple[int, ...], settings: dict[str, Any], accepted: int, drawn: list[float]
) -> None:
    script = Script()
    asked = block(drafts, [FLAT, SHARP], **settings)
    assert accept_topp_window(asked, script) == Verdict(accepted, 7)
    assert script.drawn == pytest.approx(drawn)


def test_topp_window_s_mass_is_reached_but_for_rounding() -> None:
    """Two tokens make top_p but for 1e-13, so that the third is no candidate; a row whose whole
    mass stays below top_p has every token."""
    asked = block((2,), [[0.5, 0.25 - 1e-13, 0.2, 0.05], SHARP], top_p=0.75)
    assert accept_topp_window(asked, Best()).accepted == 0
    short = [0.5, 0.2, 0.1, 0.1]
    asked = block((3,), [short, SHARP], top_p=1.0)
    assert accept_topp_window(asked, Best()).accepted == 1


def test_relaxed_takes_near_misses() -> None:
    asked = block((1,), [FLAT, SHARP], relaxed_top_n=2, relaxed_margin=0.1)
    assert accept_relaxed(asked, Best()) == Verdict(1, 0)
    asked = block((1,), [SHARP, SHARP], relaxed_top_n=2, relaxed_margin=0.1)
    assert accept_relaxed(asked, Best()) == Verdict(0, 0)


def test_relaxed_s_bounds_belong_to_what_is_accepted() -> None:
    row = [0.5, 0.25, 0.25, 0.0]
    for token, top_n, margin, accepted in (
        (1, 2, 0.25, 1),
        (1, 2, 0.24, 0),
        (2, 2, 0.25, 0),
        (2, 3, 0.25, 1),
        (0, 1, 0.0, 1),
        (1, 1, 0.5, 0),
    ):
        asked = block((token,), [row, SHARP], relaxed_top_n=top_n, relaxed_margin=margin)
        assert accept_relaxed(asked, Best()).accepted == accepted, (token, top_n, margin)


def test_relaxed_draws_from_the_row_of_the_first_refused_draft() -> None:
    for drafts, accepted, drawn in (((3, 0), 0, FLAT), ((0, 3), 1, SHARP), ((0, 0), 2, LAST)):
        script = Script()
        assert accept_relaxed(block(drafts, [FLAT, SHARP, LAST]), script) == Verdict(accepted, 7)
        assert script.drawn == drawn
