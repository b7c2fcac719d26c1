"""Comparison of tokens with a CPU's: those that rounding explains pass, and no others."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_runtime.logprobs import TokenLogprobs
from runtime.departures import SLACK, check, departures


def output(*tokens: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> Any:
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


# The best of either place is token 5; token 6 is 0.004 nats behind, token 7 is 3 behind.
PLACE = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -0.504), (7, -3.5)))
WANTED = [output(5, 5, logprobs=(PLACE, PLACE))]


def test_rounding_may_decide_between_near_tokens() -> None:
    for found in ([output(5, 5)], [output(5)], [output(5, 6)], [output(6, 9)]):
        check(found, WANTED, "float32")
    assert departures([output(6, 9)], WANTED) == [(0, 0, pytest.approx(0.004))]


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("tokens", [(5, 7), (7, 5), (5, 9)])
def test_other_tokens_are_faults(tokens: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(AssertionError):
        check([output(*tokens)], WANTED, dtype)


def test_a_token_that_was_not_considered_is_infinitely_far() -> None:
    assert departures([output(5, 9)], WANTED) == [(0, 1, math.inf)]


def test_an_output_without_tokens_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        check([output()], WANTED, "float32")
