"""Numbers of drafts: by a schedule, and by what acceptance and costs were measured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mtp_runtime.config import SpeculationConfig
from mtp_runtime.draft_length import DraftLength, Step, draft_length
from mtp_runtime.models.draft_cost import DraftCost, Routed, Touched

K = 5
AT_FIRST = 3 * (K + 1)  # steps in which every length is tried
PROBES = 40  # steps from one try of another length to the next, where none may be better

Cost = Callable[[int], float]  # seconds of a target step by its rows


ADAPTIVE = SpeculationConfig("mtp", max_draft_tokens=K, adaptive=True)


def adaptive() -> DraftLength:
    return draft_length(ADAPTIVE)


def drive(
    rule: DraftLength, *, batch: int, steps: int, acceptance: float, cost: Cost, c: float
) -> list[int]:
    """Run steps of a model in which every draft is accepted at a rate; return the lengths."""
    random = np.random.default_rng(0)
    chosen = []
    for _ in range(steps):
        drafts = rule.choose(batch)
        chosen.append(drafts)
        accepted = np.cumprod(random.random((batch, drafts)) < acceptance, axis=1).sum(axis=1)
        blocks = [(drafts, int(count)) for count in accepted]
        seconds = c * drafts + cost(batch * (drafts + 1))
        rule.observe(Step(blocks, drafts, seconds))
    return chosen


def rate(drafts: int, batch: int, acceptance: float, cost: Cost, c: float) -> float:
    """Tokens per second of a request in that model."""
    tokens = sum(acceptance**i for i in range(drafts + 1))
    return tokens / (cost(batch * (drafts + 1)) + c * drafts)


def flat(rows: int) -> float:
    return 1.0 + 0.01 * rows


def steep(rows: int) -> float:
    return 0.1 + 0.3 * rows


@pytest.mark.parametrize("batch", [1, 8, 80])
@pytest.mark.parametrize("acceptance", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("cost", [flat, steep])
def test_it_settles_on_the_best_length(batch: int, acceptance: float, cost: Cost) -> None:
    chosen = drive(adaptive(), batch=batch, steps=400, acceptance=acceptance, cost=cost, c=0.1)
    rates = [rate(drafts, batch, acceptance, cost, c=0.1) for drafts in range(K + 1)]
    assert np.mean([rates[drafts] for drafts in chosen[200:]]) > 0.97 * max(rates)


def test_every_length_is_tried_a_few_times_first() -> None:
    chosen = drive(adaptive(), batch=16, steps=60, acceptance=0.9, cost=flat, c=0.01)
    assert sorted(chosen[:AT_FIRST]) == sorted([*range(K + 1)] * 3)
    assert set(chosen[AT_FIRST : AT_FIRST + PROBES - 1]) == {K}


def test_the_best_length_is_found_beyond_a_worse_one() -> None:
    """As where kernels take rows in blocks: 16 rows in one, 24 and 32 in two."""

    def blocks(rows: int) -> float:
        return 1.0 + 0.6 * -(-rows // 16)

    chosen = drive(adaptive(), batch=8, steps=400, acceptance=0.7, cost=blocks, c=0.0)
    rates = [rate(drafts, 8, 0.7, blocks, c=0.0) for drafts in range(K + 1)]
    assert rates[1] > rates[2] < rates[3]
    assert np.mean([rates[drafts] for drafts in chosen[200:]]) > 0.97 * max(rates)


def test_a_machine_that_slows_down_changes_no_choice() -> None:
    """A busy neighbour must not make the length look bad that it came at."""
    found = []
    for slower in (1.0, 2.0):
        rule = adaptive()
        drive(rule, batch=4, steps=200, acceptance=0.7, cost=flat, c=0.15)
        found.append(
            drive(
                rule,
                batch=4,
                steps=200,
                acceptance=0.7,
                cost=lambda rows, slower=slower: slower * flat(rows),
                c=slower * 0.15,
            )
        )
    assert found[0] == found[1]


def test_times_of_a_busy_machine_do_not_add_up() -> None:
    """Over thousands of steps, each slower by chance and by the hour: the length that decodes must
    not look slower by and by, and the others better."""
    rates = [rate(drafts, 4, 0.7, flat, c=0.0) for drafts in range(K + 1)]
    shares = []
    for seed in range(5):
        random, drift = np.random.default_rng(seed), 0.0

        def busy(rows: int, random: np.random.Generator = random) -> float:
            nonlocal drift
            drift = 0.98 * drift + float(random.normal(0.0, 0.03))
            return flat(rows) * float(np.exp(drift) * (1.0 + random.exponential(0.2)))

        chosen = drive(adaptive(), batch=4, steps=3000, acceptance=0.7, cost=busy, c=0.0)
        shares.append(np.mean([rates[drafts] for drafts in chosen[1000:]]) / max(rates))
    assert np.mean(shares) > 0.98, shares


def test_it_follows_a_text_that_changes() -> None:
    rule = adaptive()
    long = drive(rule, batch=4, steps=200, acceptance=0.95, cost=flat, c=0.05)
    short = drive(rule, batch=4, steps=600, acceptance=0.1, cost=flat, c=0.05)
    again = drive(rule, batch=4, steps=600, acceptance=0.95, cost=flat, c=0.05)
    assert np.mean(long[50:]) > 4
    assert np.mean(short[300:]) < 1.5
    assert np.mean(again[300:]) > 4


def test_what_is_next_to_the_best_is_tried_again_and_again() -> None:
    chosen = drive(adaptive(), batch=1, steps=20 * PROBES, acceptance=0.05, cost=steep, c=0.1)
    later = chosen[2 * PROBES :]
    assert set(later) == {0, 1}
    assert 4 < later.count(1) < len(later) / 20


def test_what_may_be_better_is_tried_until_that_is_settled() -> None:
    """Steps scatter by a tenth: a length that is a twentieth worse is tried often at first, and one
    that is two thirds as good hardly ever."""
    random, tokens = np.random.default_rng(0), np.cumsum(0.8 ** np.arange(3))
    rule, chosen = adaptive_of(2), []
    for _ in range(1200):
        chosen.append(rule.choose(1))
        rate = (0.95, 0.65, 1.0)[chosen[-1]]
        observe(rule, chosen[-1], float(tokens[chosen[-1]] / rate * random.normal(1.0, 0.1)))
    counts = [[part.count(drafts) for drafts in range(3)] for part in (chosen[9:309], chosen[900:])]
    assert counts[0][0] > 15 and counts[0][1] < 6
    assert counts[1][0] < 15 and counts[1][2] > 280, counts


def test_one_interrupted_step_changes_nothing() -> None:
    rule = adaptive()
    before = drive(rule, batch=2, steps=100, acceptance=0.8, cost=flat, c=0.05)[-1]
    drafts = rule.choose(2)
    rule.observe(Step([(drafts, drafts)] * 2, drafts, 1000.0))
    assert rule.choose(2) == before


def test_a_drafter_that_finds_nothing_is_measured_all_the_same() -> None:
    """As n-grams that do not come again: every length is tried, and asking for most stays best."""
    rule = adaptive()
    chosen = []
    for _ in range(AT_FIRST + PROBES):
        chosen.append(rule.choose(1))
        rule.observe(Step([(0, 0)], chosen[-1], 1.0))
    assert set(chosen[:AT_FIRST]) == {*range(K + 1)}
    assert set(chosen[AT_FIRST:-1]) == {K}


def test_a_schedule_counts_from_its_batch_sizes_on() -> None:
    config = SpeculationConfig("mtp", k_schedule=((1, 5), (8, 2), (32, 0)))
    rule = draft_length(config)
    assert [rule.choose(batch) for batch in (1, 7, 8, 31, 32, 128)] == [5, 5, 2, 2, 0, 0]
    assert config.draft_tokens == 5


def adaptive_of(most: int) -> DraftLength:
    return draft_length(SpeculationConfig("mtp", max_draft_tokens=most, adaptive=True))


def observe(rule: DraftLength, drafts: int, seconds: float, batch: int = 1) -> None:
    """A step of a drafter that finds nothing, of which no acceptance is learned."""
    rule.observe(Step([(0, 0)] * batch, drafts, seconds * batch))


def seconds_of(rates: list[float]) -> list[float]:
    """Times of a step by which the lengths have these rates, where four drafts in five are
    accepted, as is assumed at first."""
    tokens = np.cumsum(0.8 ** np.arange(len(rates)))
    return [float(count / each) for count, each in zip(tokens, rates, strict=True)]


def test_lengths_that_may_become_better_are_tried_by_turns() -> None:
    """At every fortieth step: those next to the best, and all within a fifth of its rate."""
    rule, times = adaptive(), seconds_of([1.0, 0.5, 0.81, 0.79, 0.5, 0.801])
    chosen = []
    for _ in range(AT_FIRST + 6 * PROBES):
        chosen.append(rule.choose(1))
        observe(rule, chosen[-1], times[chosen[-1]])
    later = chosen[AT_FIRST:]
    assert [later[turn * PROBES - 1] for turn in range(1, 7)] == [1, 2, 5, 1, 2, 5]
    assert {one for step, one in enumerate(later, 1) if step % PROBES} == {0}


@pytest.mark.parametrize("most", [1, 2, 5])
def test_each_length_is_tried_thrice_first(most: int) -> None:
    rule = adaptive_of(most)
    chosen = []
    for _ in range(3 * (most + 1) + 1):
        chosen.append(rule.choose(1))
        observe(rule, chosen[-1], 1.0)
    assert sorted(chosen[:-1]) == sorted([*range(most + 1)] * 3)
    assert chosen[-1] == most


@pytest.mark.parametrize(
    ("batch", "alike", "others"),
    [(1, [1], [2]), (2, [2], [1, 3]), (3, [3], [2, 4]), (5, [5, 6], [4, 7]), (8, [7, 9], [6, 10])],
)
def test_batch_sizes_that_differ_little_share_their_times(
    batch: int, alike: list[int], others: list[int]
) -> None:
    times = seconds_of([0.5, 0.6, 0.7, 1.0, 0.7, 0.6])
    for other in alike + others:
        rule = adaptive()
        for _ in range(3):
            for drafts, seconds in enumerate(times):
                observe(rule, drafts, seconds, batch)
        assert rule.choose(other) == (3 if other in alike else 0), "0 is the first to be tried"


def test_times_that_are_shared_are_those_of_a_request() -> None:
    rule = adaptive()
    for _ in range(3):
        for drafts, seconds in enumerate(seconds_of([0.5, 0.6, 0.85, 1.0, 0.7, 0.6])):
            observe(rule, drafts, seconds, batch=6 if drafts % 2 else 5)
    assert rule.choose(5) == 3


def one_draft_is_worth(accepted: list[int], batch: int) -> float:
    """The share of drafts that the rule takes to be accepted after steps of one draft each: a draft
    is worth its time as long as a step with one takes less than 1 + that share times as long."""

    def drafts(seconds: float) -> int:
        rule = adaptive_of(1)
        for one in accepted:
            rule.observe(Step([(1, one)] * batch, 1, seconds * batch))
        for _ in range(3):
            observe(rule, 0, 1.0, batch)
        return rule.choose(batch)

    low, high = 1.0, 2.5
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if drafts(middle) else (low, middle)
    return low - 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "accepted", [[0] * 3, [1] * 3, [1, 0, 1, 1], [0] * 20 + [1] * 10, [1] * 20 + [0] * 10]
)
def test_recent_blocks_outweigh_what_was_assumed(accepted: list[int], batch: int) -> None:
    """Four in five, with the weight of two drafts; each step takes a hundredth of what was seen."""
    left = batch * 0.99 ** (2 + np.arange(len(accepted), 0, -1))  # after three steps without drafts
    expected = (float(left @ np.array(accepted)) + 2 * 0.8) / (float(left.sum()) + 2)
    assert one_draft_is_worth(accepted, batch) == pytest.approx(expected, abs=1e-6)


def test_positions_that_were_not_reached_are_as_the_one_before() -> None:
    """After a draft that was not accepted none is counted as reached."""
    found = []
    for blocks in ([(3, 0)], [(3, 1)], [(3, 3)], [(1, 1)]):
        rule = adaptive_of(3)
        for drafts in (0, 1, 2, 3):
            for _ in range(3):
                seconds = 1.0 + 0.55 * drafts
                rule.observe(
                    Step(blocks * 20 if drafts == 3 else [(0, 0)] * 20, drafts, 20 * seconds)
                )
        found.append(rule.choose(20))
    assert found == [0, 1, 3, 3]


@pytest.mark.parametrize(("interrupted", "drafts"), [(10, 1), (11, 0)])
def test_a_time_is_the_mean_of_the_middle_half_of_41(interrupted: int, drafts: int) -> None:
    """In which no more than ten interrupted steps are left out, and no older ones count."""
    rule = adaptive_of(1)
    for _ in range(3):
        observe(rule, 0, 0.8)
    for _ in range(60):
        observe(rule, 1, 1.0)
    for place in range(41):
        observe(rule, 1, 19.0 if place in range(1, 41, 3)[:interrupted] else 1.0)
    assert rule.choose(1) == drafts


def test_without_options_the_length_is_fixed() -> None:
    assert draft_length(SpeculationConfig("mtp", max_draft_tokens=3)).choose(9) == 3
    assert draft_length(SpeculationConfig(max_draft_tokens=3)).choose(9) == 0


# A row picks an eighth of the experts: a step with 1 draft costs 1.88 times as much, with 5 4.41.
ROUTED = DraftCost(Touched(0, (Routed(800, 1 / 8),)), Touched(0))
# Of 1 and 2 drafts the cost is less than the 1.8 and 2.44 tokens that are assumed at first.
DEAR_DRAFTS = DraftCost(Touched(100, (Routed(800, 1 / 8),)), Touched(60))


@pytest.mark.parametrize(("cost", "paying"), [(ROUTED, [0]), (DEAR_DRAFTS, [0, 1, 2])])
def test_lengths_that_do_not_pay_by_bytes_are_not_tried_first(
    cost: DraftCost, paying: list[int]
) -> None:
    rule, chosen = draft_length(ADAPTIVE, cost), []
    for _ in range(3 * len(paying) + 1):
        chosen.append(rule.choose(1))
        observe(rule, chosen[-1], cost.step(chosen[-1]))
    assert sorted(chosen[:-1]) == sorted(paying * 3)
    assert chosen[-1] in paying


def test_a_wrong_prediction_is_found_out() -> None:
    """As of rows that all pick the same experts: bytes promise nothing, and times a lot."""
    rule = draft_length(ADAPTIVE, ROUTED)
    chosen = drive(rule, batch=1, steps=400, acceptance=0.95, cost=flat, c=0.01)
    assert set(chosen[:PROBES]) == {0}
    assert np.mean(chosen[200:]) > 4, chosen
