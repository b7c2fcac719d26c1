"""Figures of generate as people see them, and the comparison with plain decoding."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cases import run_program
from mtp_export import busy_machine
from mtp_export.busy_machine import Elapsed, busy_line
from mtp_export.commands import generate, plain_comparison
from mtp_export.commands.decoding_figures import acceptance_lines, rates_line
from mtp_export.commands.plain_comparison import Comparison, Turn
from mtp_runtime import LLM, RequestMetrics, RequestOutput, SamplingParams, summarise
from mtp_runtime.engine import Engine

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
ASKED = (FIXTURE, "--prompt", "def read(", "--max-new-tokens", "12")
QUIET = Elapsed(0.25, 0.0)
BUSY = Elapsed(1.0, 0.2)


def metrics(*blocks: tuple[int, int]) -> RequestMetrics:
    """Counts of a request by blocks of drafts: how many there were and were accepted."""
    counts = RequestMetrics(output_tokens=sum(1 + accepted for _, accepted in blocks))
    for drafted, accepted in blocks:
        counts.count(drafted, accepted)
    return counts


ONE = [metrics((2, 2), (2, 2), (2, 1), (2, 0))]


def console(width: int, encoding: str = "utf-8") -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=width)


def test_rates_say_what_drafts_bring() -> None:
    assert rates_line(summarise(ONE, 0.25), QUIET) == (
        "9 tokens in 0.25 s: 36 tokens/s, 2.25 tokens per step (plain: 1)"
    )
    plain = summarise([RequestMetrics(output_tokens=2, target_steps=2)], 0.25)
    assert rates_line(plain, QUIET) == "2 tokens in 0.25 s: 8.0 tokens/s, without drafts"
    assert busy_line(Elapsed(1.0, 0.225)) == (
        "this machine is too busy to tell rates: waiting for processors 22 % of the time"
    )


def test_a_busy_machine_tells_no_rate() -> None:
    """Nor seconds, which are one to whoever divides by them."""
    assert rates_line(summarise(ONE, 0.25), BUSY) == "9 tokens, 2.25 tokens per step (plain: 1)"
    plain = summarise([RequestMetrics(output_tokens=2, target_steps=2)], 0.25)
    assert rates_line(plain, BUSY) == "2 tokens, without drafts"


def test_a_bar_stands_for_each_position() -> None:
    summary = summarise(ONE, 0.25)
    (line,) = acceptance_lines(summary, ONE, console(80))
    assert line.plain == "draft 1 ███████▌   75 % (3 of 4)   draft 2 █████      50 % (2 of 4)"
    (line,) = acceptance_lines(summary, ONE, console(80, "ascii"))
    assert line.plain == "draft 1 ########   75 % (3 of 4)   draft 2 #####      50 % (2 of 4)"


def test_a_full_bar_stands_apart_from_its_figure() -> None:
    full = [metrics((1, 1), (1, 1), (1, 1))]
    (line,) = acceptance_lines(summarise(full, 0.25), full, console(80))
    assert line.plain == "draft 1 ██████████ 100 % (3 of 3)"


def test_an_interval_of_few_prompts_is_one_of_shares() -> None:
    few = [metrics((1, 1)), metrics((1, 0))]
    (line,) = acceptance_lines(summarise(few, 0.25), few, console(80))
    assert line.plain == "draft 1 █████      50 % [0, 100] (1 of 2)"


@pytest.mark.parametrize("width", [20, 24, 40, 67, 68, 80])
def test_bars_fit_the_terminal(width: int) -> None:
    several = [*ONE, metrics((2, 2), (2, 0))]
    for each in (ONE, several):
        lines = acceptance_lines(summarise(each, 1.0), each, console(width))
        assert all(line.cell_len <= max(width, 35) for line in lines)
        assert "".join(line.plain for line in lines).count("draft") == 2
    assert "[" in lines[0].plain


def output(*tokens: int, steps: int) -> RequestOutput:
    counts = RequestMetrics(output_tokens=len(tokens), target_steps=steps)
    return RequestOutput((1,), tokens, "", "length", 0, counts)


def turn(drafted_rate: float, plain_rate: float, *, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> Turn:
    drafted, plain = output(*tokens, steps=2), output(1, 2, 3, 4, steps=4)
    return Turn([drafted], [plain], drafted_rate, plain_rate)


def test_the_gain_is_the_median_of_the_turns() -> None:
    turns = [turn(190.0, 100.0), turn(160.0, 100.0), turn(10.0, 100.0)]
    found = Comparison(turns, QUIET, is_greedy=True)
    assert found.lines(QUIET) == ["1.6x plain decoding (100 tokens/s), same tokens"]
    other = Comparison([*turns, turn(160.0, 100.0, tokens=(1, 2, 3))], QUIET, is_greedy=True)
    assert other.lines(QUIET)[-1].endswith(", different tokens")
    sampled = Comparison(turns, QUIET, is_greedy=False)
    assert sampled.lines(QUIET) == ["1.6x plain decoding (100 tokens/s)"]
    assert sampled.as_json() == {
        "turns": 3,
        "tokens_per_second": 100.0,
        "speedup": 1.6,
        "same_tokens": True,
        "too_busy": False,
        "waiting_for_processors": 0.0,
    }


@pytest.mark.parametrize("run", [QUIET, BUSY])
def test_no_gain_is_told_of_a_busy_machine(run: Elapsed) -> None:
    """Once, and not of rates that the run before has told; the tokens are compared all the same."""
    found = Comparison([turn(190.0, 100.0)], BUSY, is_greedy=True)
    waiting = "waiting for processors 20 % of the time"
    assert found.lines(run) == [
        f"this machine is too busy to tell {'rates and' if run is BUSY else 'the'} gain: {waiting}",
        "with drafts or without: same tokens",
    ]
    assert found.as_json()["too_busy"]
    sampled = replace(found, is_greedy=False)
    assert sampled.lines(run)[-1].endswith(waiting)


def test_no_gain_is_told_that_drafts_cannot_bring() -> None:
    beyond = Comparison([turn(230.0, 100.0)], QUIET, is_greedy=True)  # with 2 tokens per step
    told = [
        "this machine is too busy to tell the gain: drafts cannot bring 2.3x",
        "with drafts or without: same tokens",
    ]
    assert beyond.lines(QUIET) == told and beyond.as_json()["too_busy"]
    (rate, *_) = beyond.lines(BUSY)
    assert rate.startswith("this machine is too busy to tell the rate with drafts: waiting")
    assert beyond.lines(BUSY)[1:] == told


def test_compare_decodes_plainly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_machine, "processor_seconds", lambda: (0.0, 0.0))
    outcome = run_program("generate", *ASKED, "--compare")
    assert outcome.code == 0
    *_, last = outcome.out.splitlines()
    assert last.endswith((", same tokens", ": same tokens"))
    assert outcome.out.count("too busy") <= 1
    facts = json.loads(run_program("generate", *ASKED, "--compare", "--json").out)
    assert facts["plain"]["same_tokens"] and facts["plain"]["tokens_per_second"] > 0


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, 3), (6.0, 2), (11.0, 1)])
def test_turns_are_three_or_as_many_as_there_is_time_for(
    seconds: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, decoded = iter(range(100)), []

    def timed(llm: object, prompts: object, params: Sequence[SamplingParams]) -> Any:
        decoded.append([own.use_drafts for own in params])
        return [], 1.0

    monkeypatch.setattr(plain_comparison, "_timed", timed)
    fake = SimpleNamespace(monotonic=lambda: next(clock) * seconds)
    monkeypatch.setattr(plain_comparison, "time", fake)
    found = plain_comparison.compared(cast(Any, None), ["a"], [SamplingParams()])
    assert len(found.turns) == turns and decoded == [[False], [True]] * turns


def test_compare_needs_drafts() -> None:
    outcome = run_program("generate", *ASKED, "--compare", "--speculate-method", "none")
    assert outcome.code == 2 and "--compare" in outcome.err


def test_ctrl_c_ends_the_text_and_shows_the_figures_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, steps = Engine._step, iter(range(100))

    def advance(engine: Engine) -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt
        real(engine)

    monkeypatch.setattr(LLM, "warm_up", lambda llm: None)
    monkeypatch.setattr(Engine, "_step", advance)
    monkeypatch.setattr(busy_machine, "processor_seconds", lambda: (0.0, 0.0))
    outcome = run_program("generate", *ASKED)
    assert outcome.code == 130 and outcome.err == "mtp-export: Interrupted.\n"
    text, figures = outcome.out.split("\n\n")[-2:]
    assert text and "tokens/s" in figures and "draft 1" in figures


def test_only_a_terminal_gets_the_prompt() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert generate._echo("def read(", terminal).plain == "def read("
    assert generate._echo((1, 2), terminal).plain == ""
    assert generate._echo("def read(", console(80)).plain == ""


def test_params_without_drafts_are_flags() -> None:
    with pytest.raises(Exception, match="use_drafts is neither"):
        SamplingParams(use_drafts=1)  # type: ignore[arg-type]
