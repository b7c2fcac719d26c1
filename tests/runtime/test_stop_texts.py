"""Stop texts are found as by looking at the whole text, and in time that their length does not
count in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.stop_texts import StopTexts


def first_by_looking(text: str, piece: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The first stop text that ends in a piece of a text."""
    found = []
    for stop in stops:
        for end in range(len(text) + 1, len(text + piece) + 1):
            if (text + piece)[:end].endswith(stop):
                found.append((end - len(stop) - len(text), stop))
                break
    return min(found, default=None)


def held_by_looking(text: str, stops: Sequence[str]) -> int:
    sizes = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(sizes, default=0)


@pytest.mark.parametrize("letters", ["a", "ab", "abc"])
def test_searches_are_those_of_the_whole_text(letters: str) -> None:
    choice = random.Random(len(letters))

    def word(longest: int) -> str:
        return "".join(choice.choices(letters, k=choice.randint(1, longest)))

    met = 0
    for _ in range(300):
        stops, text = [word(6) for _ in range(choice.randint(0, 3))], ""
        search = StopTexts(stops)
        for _ in range(20):
            piece = word(4)[choice.randint(0, 1) :]
            first = first_by_looking(text, piece, stops)
            assert search.first_in(piece) == first
            text += piece
            assert search.held == held_by_looking(text, stops)
            met += first is not None
    assert met


class Counted(str):
    """A text that counts how often characters of it are asked for."""

    reads = 0

    def __getitem__(self, key: Any) -> str:
        Counted.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("stop", ["q" * 2000, "a" * 2000, "ab" * 1000, "a" * 999 + "b"])
def test_long_stop_texts_are_read_in_part(stop: str) -> None:
    """Character by character of the output, also where it begins the stop text again and again."""
    Counted.reads = 0
    params = SamplingParams(max_tokens=400, stop=Counted(stop))
    request = Request(0, (1,), params, decode=lambda ids: "a" * len(ids))
    for _ in range(400):
        request.commit((5,), 0)
    assert request.finish_reason == "length" and request.text == "a" * 400
    assert Counted.reads < 10 * 400
    assert "".join(event.text for event in request.take_events()) == request.text


@pytest.mark.parametrize("end", ["length", "stop token"])
def test_text_that_is_held_back_comes_at_the_end(end: str) -> None:
    """Bytes that stay no character, as all tokens together decode to them."""
    stop = (7,) if end == "stop token" else ()
    params = SamplingParams(max_tokens=3, stop_token_ids=stop)
    letters = {5: "a", 6: "\ufffd", 7: ""}
    decode = lambda ids: "".join(letters[token] for token in ids)  # noqa: E731
    request = Request(0, (1,), params, decode=decode)
    for token in (5, 6, 7):
        request.commit((token,), 0)
    assert request.finish_reason == ("stop" if stop else "length")
    assert request.text == "a\ufffd"
    assert [event.text for event in request.take_events()] == ["a", "", "\ufffd"]


def test_a_stop_text_in_what_is_held_back() -> None:
    params = SamplingParams(max_tokens=2, stop="\ufffd")
    request = Request(0, (1,), params, decode=lambda ids: "a\ufffd"[: len(ids)])
    request.commit((5, 6), 0)
    assert (request.text, request.finish_reason, request.stop_reason) == ("a", "stop", "\ufffd")
