"""Sampling worked out by hand: bounds of parameters, distributions, and draws at their edges."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
import pytest

from mtp_checkpoints.errors import UsageError
from mtp_runtime.sampling import (
    SamplingParams,
    SeededChoices,
    one_hot,
    probabilities_of,
    random_seed,
)

BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "temperature": ((0.0, 100.0), (-1e-9, 100.5)),
    "top_p": ((0.0, 1.0), (-1e-9, 1.5)),
    "top_k": ((0, 1 << 30), (-1, (1 << 30) + 1)),
    "max_tokens": ((1, 1 << 30), (0, (1 << 30) + 1)),
    "min_tokens": ((0, 64), (-1, 65)),
    "seed": ((None, 0, (1 << 64) - 1), (-1, 1 << 64)),
    "logprobs": ((None, 0, 20), (-1, 21)),
    "prompt_logprobs": ((None, 0, 20), (-1, 21)),
}
ALL = SamplingParams(temperature=1.0)


def rows_of(*rows: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits whose softmax at temperature 1 is these probabilities."""
    return np.log(np.array(rows, dtype=np.float32))


EQUAL = rows_of([0.25, 0.25, 0.25, 0.25])


@pytest.mark.parametrize("name", BOUNDS)
def test_parameters_within_their_bounds(name: str) -> None:
    inside, outside = BOUNDS[name]
    for value in inside:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(UsageError, match=f"^Option {name} is out of range.*Found {value}"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (True, "1", b"1", [1], 1j)) for name in BOUNDS),
        *((name, (None,)) for name, (inside, _) in BOUNDS.items() if None not in inside),
        *((name, (1.5,)) for name in BOUNDS if name not in ("temperature", "top_p")),
        ("temperature", (math.nan,)),
        ("top_p", (math.nan,)),
        ("stop", (5, "", b"x", ["a", ""], ["a", 5], {"a": 1})),
        ("stop_token_ids", (5, "ab", b"ab", ("a",), (-1,), (1.0,), (True,), (None,), {1: 2})),
        ("ignore_eos", (None, 0, "no")),
    ],
)
def test_parameters_of_other_kinds_are_refused(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"^Option {name} "):
            SamplingParams(**{name: value})


def test_no_stop_token_ids_are_none_or_an_empty_sequence() -> None:
    given: tuple[Any, ...] = (None, (), [], [3, 5])
    assert [SamplingParams(stop_token_ids=ids).stop_ids for ids in given] == [(), (), (), (3, 5)]


def test_defaults_decode_greedily_to_64_tokens() -> None:
    explicit = SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        max_tokens=64,
        seed=None,
        stop=None,
        stop_token_ids=(),
        ignore_eos=False,
    )
    assert SamplingParams() == explicit
    assert explicit.greedy and not SamplingParams(temperature=1e-9).greedy


def test_stop_texts_are_a_tuple_however_they_are_given() -> None:
    given: tuple[Any, ...] = (None, "ab", ["ab", "c"], ("x",))
    found = [SamplingParams(stop=stop).stop_texts for stop in given]
    assert found == [(), ("ab",), ("ab", "c"), ("x",)]


def test_a_greedy_request_takes_the_best_token_the_lower_of_equals() -> None:
    logits = np.array([[1.0, 3.0, 3.0], [9.0, 0.0, 8.0]], dtype=np.float32)
    found = probabilities_of(logits, SamplingParams(top_k=2, top_p=0.1))
    assert found.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_temperature_is_a_divisor_of_logits() -> None:
    logits = rows_of([0.5, 0.25, 0.25], [0.1, 0.3, 0.6])
    for temperature in (0.5, 1.0, 2.0):
        powers = np.exp(logits.astype(np.float64)) ** (1 / temperature)
        found = probabilities_of(logits, SamplingParams(temperature=temperature))
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, powers / powers.sum(axis=1, keepdims=True), rtol=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30])
def test_a_temperature_near_zero_takes_the_best_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    logits = np.array([[1.0, 3.0, -2.0], [-1e30, 1e30, 0.0]], dtype=np.float32)
    assert probabilities_of(logits, params).tolist() == [[0.0, 1.0, 0.0]] * 2


def test_large_logits_do_not_overflow() -> None:
    found = probabilities_of(np.array([5000.0, 4999.0, -5000.0], dtype=np.float32), ALL)
    assert found == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 1}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 3}, [1 / 3, 1 / 3, 1 / 3, 0.0]),
        ({"top_k": 9}, [0.25, 0.25, 0.25, 0.25]),
        ({"top_p": 0.0}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.25}, [1.0, 0.0, 0.0, 0.0]),  # reached, not exceeded
        ({"top_p": 0.26}, [0.5, 0.5, 0.0, 0.0]),
        ({"top_p": 0.5}, [0.5, 0.5, 0.0, 0.0]),
        ({"top_p": 0.99}, [0.25, 0.25, 0.25, 0.25]),
        ({"top_k": 2, "top_p": 0.5}, [1.0, 0.0, 0.0, 0.0]),  # of the mass that top_k left
        ({"top_k": 2, "top_p": 1.0}, [0.5, 0.5, 0.0, 0.0]),
    ],
)
def test_of_equal_tokens_the_lower_ones_are_kept(
    changes: dict[str, Any], expected: list[float]
) -> None:
    found = probabilities_of(EQUAL[0], SamplingParams(temperature=1.0, **changes))
    assert found.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_p": 9 / 5461}])
def test_of_many_equal_tokens_the_lower_ones_are_kept(changes: dict[str, Any]) -> None:
    row = [2 / 5461 if token % 3 == 1 else 1 / 5461 for token in range(4096)]
    params = SamplingParams(temperature=1.0, **changes)
    for found in probabilities_of(rows_of(row, row), params):
        assert np.flatnonzero(found).tolist() == [1, 4, 7, 10, 13]


def test_seeds_of_requests_that_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many bits that every JSON reader takes them, and two are hardly ever equal."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: bits)
    assert random_seed() == 32


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.75}, {"top_k": 3, "top_p": 0.8}])
def test_each_row_keeps_its_own_best_tokens(changes: dict[str, Any]) -> None:
    logits = rows_of([0.1, 0.4, 0.1, 0.4], [0.5, 0.02, 0.4, 0.08])
    found = probabilities_of(logits, SamplingParams(temperature=1.0, **changes))
    expected = [[0.0, 0.5, 0.0, 0.5], [5 / 9, 0.0, 4 / 9, 0.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for row, alone in zip(logits, found, strict=True):
        own = probabilities_of(row, SamplingParams(temperature=1.0, **changes))
        assert own.tolist() == alone.tolist()


def test_certainties_of_one_token_and_of_rows() -> None:
    assert one_hot(2, 4).tolist() == [0.0, 0.0, 1.0, 0.0]
    found = one_hot(np.array([[1, 0], [2, 2]]), 3)
    assert found.tolist() == [[[0, 1, 0], [1, 0, 0]], [[0, 0, 1], [0, 0, 1]]]


class Fixed:
    """A generator whose every number is the same."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


def choices_at(number: float, patch: pytest.MonkeyPatch) -> SeededChoices:
    patch.setattr(np.random, "Generator", lambda bits: Fixed(number))
    return SeededChoices(0)


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (0.49, 1), (0.5, 2), (0.99, 2), (1.0, 2)])
@pytest.mark.parametrize("mass", [1.0, 0.999, 3.0])
def test_a_token_without_probability_is_never_drawn(
    number: float, token: int, mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    probabilities = np.array([0.0, 0.5, 0.5, 0.0]) * mass
    assert choices_at(number, monkeypatch).draw(probabilities) == token


def test_a_draft_is_accepted_below_its_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = choices_at(0.25, monkeypatch)
    assert [choices.accept(p) for p in (0.0, 0.25, 0.26, 1.0)] == [False, False, True, True]
    assert not choices_at(0.0, monkeypatch).accept(0.0)


def test_a_seed_decides_every_draw() -> None:
    probabilities = np.full(1000, 1e-3)

    def draws(seed: int) -> list[int]:
        choices = SeededChoices(seed)
        return [choices.draw(probabilities) for _ in range(8)]

    assert draws(1) == draws(1)
    assert len({tuple(draws(seed)) for seed in (0, 1, 2, (1 << 64) - 1)}) == 4
    assert len(set(draws(1))) > 1
