"""Attempts of a request: how often, after which waits, and what its last failure says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources import transfers
from mtp_checkpoints.sources.transfers import AttemptFailed, patiently, transfer


def failed(what: str = "broken", **facts: float | str) -> AttemptFailed:
    known = {"server": "huggingface.co", "cause": what}
    return AttemptFailed(IoError(what), **(known | facts))  # type: ignore[arg-type]


def test_a_request_is_made_six_times(waits: list[float]) -> None:
    attempts = iter(range(100))

    def attempt() -> None:
        raise failed(f"attempt {next(attempts)}") from ConnectionError("reset")

    with pytest.raises(IoError, match="attempt 5") as caught:
        patiently(attempt)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert next(attempts) == 6


def test_a_request_that_succeeds_is_not_made_again(waits: list[float]) -> None:
    answers = iter([failed(), failed(), "answer", failed()])

    def attempt() -> str:
        answer = next(answers)
        if isinstance(answer, AttemptFailed):
            raise answer
        return answer

    assert patiently(attempt) == "answer"
    assert waits == [0.5, 1.0]


def test_the_longest_wait(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "RETRIES", 7)
    with pytest.raises(IoError):
        patiently(lambda: _raise(failed()))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_failure_for_good_is_not_tried_again(waits: list[float]) -> None:
    with pytest.raises(IoError, match="for good"):
        patiently(lambda: _raise(failed("for good", is_final=True)))
    assert waits == []


def test_what_a_server_asks_to_wait_comes_on_top_but_not_for_ever(waits: list[float]) -> None:
    answers = iter([failed(told_seconds=10.0), failed(told_seconds=599.5), failed(is_final=True)])
    with pytest.raises(IoError):
        patiently(lambda: _raise(next(answers)))
    assert waits == [10.5, 600.0]


def test_a_name_that_is_not_known_is_looked_up_twice(waits: list[float]) -> None:
    """But six times where bytes are on their way: a night's transfer outlives such a minute."""
    unknown = failed(is_unknown_name=True)
    with pytest.raises(IoError):
        patiently(lambda: _raise(unknown))
    assert waits == [0.5]
    waits.clear()

    def stream(span: range) -> Iterator[bytes]:
        raise unknown
        yield b""

    with pytest.raises(IoError):
        transfer(stream, range(9), lambda data: None, waits.append)
    assert len(waits) == 5


def test_every_further_attempt_is_logged(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", transfers.__name__)
    answers = iter([failed(cause="HTTP 503", told_seconds=2.0), failed("broken")])
    with pytest.raises(IoError):
        patiently(lambda: _raise(next(answers, failed(is_final=True))))
    assert caplog.messages == [
        "huggingface.co: HTTP 503; attempt 2 of 6 in 2.5 s",
        "huggingface.co: broken; attempt 3 of 6 in 1.0 s",
    ]
    known = [(vars(record)["server"], vars(record)["attempt"]) for record in caplog.records]
    assert known == [("huggingface.co", 2), ("huggingface.co", 3)]


def _raise(error: Exception) -> None:
    raise error


def test_the_words_of_a_failed_attempt() -> None:
    assert str(failed("words")) == "words"
    assert (failed().is_final, failed().told_seconds) == (False, 0.0)


class Broken:
    """A transfer that breaks off after some bytes, time and again."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = iter(sizes)
        self.spans: list[range] = []

    def __call__(self, span: range) -> Iterator[bytes]:
        self.spans.append(span)
        size = next(self._sizes, len(span))
        if size:
            yield bytes(span[: min(size, len(span))])
        if size < len(span):
            raise failed()


def test_a_transfer_goes_on_where_it_broke_off(waits: list[float]) -> None:
    stream, data = Broken(3, 0, 0, 1), bytearray()
    transfer(stream, range(10, 20), data.extend, waits.append)
    assert bytes(data) == bytes(range(10, 20))
    assert stream.spans == [
        range(10, 20),
        *[range(13, 20)] * 3,
        range(14, 20),
    ]
    # A byte that came is progress: the waits begin anew.
    assert waits == [0.5, 1.0, 2.0, 0.5]


def test_a_transfer_without_progress_ends(waits: list[float]) -> None:
    stream = Broken(2, *[0] * 100)
    with pytest.raises(IoError, match="broken"):
        transfer(stream, range(5), lambda data: None, waits.append)
    assert len(waits) == 5 and len(stream.spans) == 6


def test_nothing_is_asked_for_an_empty_span() -> None:
    stream = Broken()
    transfer(stream, range(5, 5), lambda data: None, lambda seconds: None)
    assert stream.spans == []
