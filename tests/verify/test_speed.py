"""Check `speed`: ways to decode take turns step by step, and figures that other load alone explains
are told from those that recommend a k."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mtp_export.verify.check import CheckResult, Item, Status
from mtp_export.verify.decoding import speed
from mtp_export.verify.decoding.speed import Gain, Pace, Way
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.report import Report
from mtp_runtime.config import NO_DRAFTS
from mtp_runtime.engine import Engine
from mtp_runtime.models.draft_cost import DraftCost, Routed, Touched
from mtp_runtime.models.load import LoadOptions, load_model
from runtime.checkpoints import SMALL, write_checkpoint

# A step with two drafts takes 1.5 plain ones, of which drafting 0.3, and brings 2.4 tokens.
STEADY = Pace(2, [1.4, 1.5, 1.6], [0.3, 0.3, 0.3], 7.2)
BUSY = Pace(2, [0.7, 0.81, 0.9], [0.3, 0.3, 0.3], 7.2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = write_checkpoint(tmp_path_factory.mktemp("small"), SMALL)
    prompts = tuple(tuple(range(first, first + 6)) for first in (3, 20, 40, 60))
    return Corpus(load_model(folder, LoadOptions()).model, prompts, 16)


def test_the_figures_of_a_pace() -> None:
    item = speed.speedup("batch 1, k=2", 2.6, STEADY, batch=1)
    assert item.status is Status.PASS
    assert item.figure == "1.60x [1.55, 1.66], predicted 1.73x (v 1.20, c 0.150, E[L] 2.60)"
    told = {"batch": 1, "k": 2, "measured": 1.6, "v": 1.2, "c": 0.15, "predicted": 2.6 / 1.5}
    told |= {"expected_length": 2.6, "low": 2.4 / 1.55, "high": 2.4 / 1.45}
    assert item.data == {name: pytest.approx(value) for name, value in told.items()}


def test_bytes_predict_a_speedup_beside_the_measured_one() -> None:
    """A step with two drafts touches 1.375 times the bytes, and each of them a fifth."""
    cost = DraftCost(Touched(50, (Routed(100, 0.5),)), Touched(20))
    item = speed.speedup("batch 1, k=2", 2.6, STEADY, batch=1)
    told = speed.with_bytes(item, cost)
    assert told.figure.endswith("E[L] 2.60), 1.46x by bytes touched (v 1.38, c 0.200)")
    assert cost.v(2) == pytest.approx(1.375) and told.data["v_by_bytes"] == cost.v(2)
    found = {"v_by_bytes": 1.375, "c_by_bytes": 0.2, "predicted_by_bytes": 2.6 / 1.775}
    assert told.data == item.data | {name: pytest.approx(value) for name, value in found.items()}
    assert speed.with_bytes(item, None) == item
    untimed = speed.speedup("batch 1, k=2", 1.0, Pace(2), batch=1)
    assert speed.with_bytes(untimed, cost) == untimed


def test_a_burst_of_other_load_is_left_out() -> None:
    spoilt = Pace(2, [*STEADY.ratios, 20.0, 0.02], [0.3, 0.3, 0.3, 9.0, 0.01], 12.0)
    assert spoilt.gain == pytest.approx(STEADY.gain)
    assert (spoilt.v, spoilt.c) == pytest.approx((STEADY.v, STEADY.c))


@pytest.mark.parametrize(("factor", "tells"), [(0.81, True), (0.78, False)])
def test_a_step_with_drafts_is_not_cheaper_than_one_without(factor: float, tells: bool) -> None:
    pace = Pace(1, [1.2 * factor] * 4, [0.0] * 4, 6.0)
    assert pace.contradicts is not tells
    with_drafts = Pace(1, [1.2 * factor + 0.2] * 4, [0.2] * 4, 6.0)
    assert with_drafts.contradicts is not tells


def recommended(gains: dict[int, list[Gain]], unknown: list[str]) -> Item:
    return speed._recommended(gains, [], unknown)


def test_nothing_is_recommended_of_figures_that_contradict() -> None:
    item = speed.speedup("batch 1, k=2", 2.6, BUSY, batch=1)
    assert item.status is Status.NOT_TESTED and "too busy to tell" in item.cause
    assert item.figure.startswith("2.96x")
    alone = recommended({}, ["batch 1 with k=2"])
    assert alone.status is Status.NOT_TESTED and "too busy to tell" in alone.cause
    some = recommended({4: [Gain(3, 1.4, 1.3, 1.5)]}, ["batch 1 with k=2"])
    assert some.figure == (
        "use k=3 (1.40x) at batch 4; this machine is too busy to tell of batch 1 with k=2"
    )
    assert some.data == {"recommended": {"4": {"k": 3, "speedup": 1.4}}}
    report = Report(
        options=VerifyOptions(Path("bundle")),
        facts={"source_bytes": 0, "parts_bytes": {}},
        results=(CheckResult("speed", "Speed", (item,), 1.0),),
        seconds=1.0,
    )
    assert charts(report) == ()


def test_a_gain_has_the_ends_of_what_drafts_bring() -> None:
    """Of tokens per step from none to all of the drafts; a single prompt says nothing of others."""
    gain = Gain.of(STEADY, Estimate(2.0, 1.8, 2.5, 9))
    assert vars(gain) == pytest.approx({"k": 2, "value": 1.6, "low": 1.44, "high": 2.0})
    wide = Gain.of(STEADY, Estimate(2.0, -3.0, 9.0, 9))
    assert (wide.low, wide.high) == pytest.approx((0.8, 2.4))
    alone = Gain.of(STEADY, Estimate(2.4, None, None, 9))
    assert (alone.low, alone.high) == pytest.approx((1.6 / 2.4, 1.6 / 2.4 * 3))


def test_no_number_is_recommended_that_too_few_prompts_cannot_tell() -> None:
    """From plain decoding, or from another number that an end of the intervals makes the best."""
    one, two = Gain(1, 1.3, 1.2, 1.4), Gain(2, 1.5, 1.1, 1.9)
    rough = recommended({1: [one, two]}, [])
    assert rough.figure == (
        "too few prompts to tell k=2 (1.50x) from k=1 at batch 1: give more by --prompts"
    )
    told = {"k": 2, "speedup": 1.5, "not_told_from": [1]}
    assert rough.data == {"recommended": {"1": told}}
    slow = Gain(1, 0.9, 0.6, 1.2)
    both = recommended({1: [slow], 4: [Gain(1, 1.3, 0.9, 1.4), Gain(2, 1.2, 0.7, 1.6)]}, [])
    assert both.figure == (
        "too few prompts to tell none from k=1 at batch 1, k=1 (1.30x) from none and k=2 at"
        " batch 4: give more by --prompts"
    )
    some = recommended({1: [one, two], 4: [one]}, [])
    assert some.figure.startswith("use k=1 (1.30x) at batch 4; too few prompts to tell k=2 ")
    assert recommended({1: [Gain(1, 0.9, 0.8, 0.95)]}, []).figure == (
        "use none: every k was slower"
    )


def test_ways_take_turns_step_by_step(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes ten times as long for every other turn of steps shows in no figure. The
    clock counts the rows of a step, as if each cost a tenth of a step, and drafting nothing."""
    clock, turn, steps = 0.0, -1, list[int]()
    real = Engine.step

    def step(self: Engine) -> None:
        nonlocal clock, turn
        speculation = self.config.speculation
        k = 0 if speculation.method == NO_DRAFTS else speculation.max_draft_tokens
        turn += k == 0
        steps.append(k)
        real(self)
        clock += (1 + 0.1 * k) * (10 if turn % 2 else 1)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    monkeypatch.setattr(speed, "_TURNS", 2)
    one, three = speed.paces(corpus, 2, [Way.of(corpus, None, k) for k in (1, 3)])
    assert one.v == pytest.approx(1.1) and three.v == pytest.approx(1.3)
    assert (one.c, three.c) == (0.0, 0.0)
    assert one.tokens_per_step >= 1 and three.tokens_per_step >= 1
    assert one.ratios == pytest.approx([1.1] * len(one.ratios))
    assert steps[:6] == [0, 1, 3, 0, 1, 3]


def test_a_run_of_too_few_tokens_is_not_timed(corpus: Corpus) -> None:
    item = speed.speedup("batch 1, k=2", 1.0, Pace(2), batch=1)
    assert item.status is Status.NOT_TESTED and "--max-new-tokens" in item.cause
