"""Clocks of forked children: one that hangs is found with its place, one that a busy machine lets
wait is not taken for it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fuzz import children
from fuzz.inputs import Key, Verdict

SEED = 5
BUSY_PROCESSES = 4
FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def good(key: Key) -> Verdict:
    return Verdict(key, command="export", mutators=(), codes=(), seconds=0.0)


def verdict_of(act: Callable[[], object], folder: Path) -> Verdict:
    def judge(key: Key, place: Path) -> Verdict:
        act()
        return good(key)

    (verdict,) = children.verdicts(iter([SEED]), judge, folder)
    return verdict


def wait_for_ever() -> None:
    threading.Event().wait()


def compute_for_ever() -> None:
    while True:
        pass


@pytest.mark.parametrize("act", [wait_for_ever, compute_for_ever])
def test_a_hang_is_found(
    act: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "MAX_SECONDS", 0.3)
    finding = verdict_of(act, tmp_path / "case").finding
    assert finding is not None and finding.oracle == "hang"
    assert act.__name__ in finding.details


def test_a_death_is_no_hang(tmp_path: Path) -> None:
    finding = verdict_of(lambda: os._exit(7), tmp_path / "case").finding
    assert finding is not None
    assert (finding.oracle, finding.place) == ("death", "exit code 7")


def test_a_case_that_ends_a_little_late_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a hang is: a busy machine may have kept it."""
    monkeypatch.setattr(children, "MAX_SECONDS", 0.3)
    first = tmp_path / "first"

    def late_once() -> None:
        if not first.exists():
            first.touch()
            time.sleep(0.6)

    assert verdict_of(late_once, tmp_path / "case") == good(SEED)
    assert first.exists()


def test_a_child_that_hangs_has_ended_before_its_case_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write to the folder of the second run."""
    monkeypatch.setattr(children, "MAX_SECONDS", 0.3)
    first = tmp_path / "first"

    def hang_once() -> None:
        if not first.exists():
            first.write_text(str(os.getpid()))
            compute_for_ever()
        with pytest.raises(ProcessLookupError):
            os.kill(int(first.read_text()), 0)

    assert verdict_of(hang_once, tmp_path / "case") == good(SEED)


@contextmanager
def busy(processor: int) -> Iterator[None]:
    """Keep a processor busy with others' work."""

    def work() -> None:
        os.sched_setaffinity(0, {processor})
        compute_for_ever()

    others = [FORK.Process(target=work, daemon=True) for _ in range(BUSY_PROCESSES)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def test_waiting_for_a_busy_processor_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "MAX_SECONDS", 0.6)
    processor = min(os.sched_getaffinity(0))
    took = FORK.SimpleQueue()

    def compute() -> None:
        os.sched_setaffinity(0, {processor})
        start, end = time.monotonic(), time.process_time() + 0.3
        while time.process_time() < end:
            pass
        took.put(time.monotonic() - start)

    with busy(processor):
        verdict = verdict_of(compute, tmp_path / "case")
    assert verdict == good(SEED)
    assert took.get() > children.MAX_SECONDS, "the machine was not busy"
