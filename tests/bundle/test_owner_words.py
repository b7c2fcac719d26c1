"""Claims on a folder to the letter: what they say, how long they are watched, and each refusal."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_checkpoints.errors import IoError, OutputExistsError
from mtp_export.bundle import owner as module
from mtp_export.bundle.owner import OWNER_NAME, Owner, has_ended, owner_of, process_mark

ELSEWHERE: dict[str, Any] = {
    "host": "node17",
    "process": 4242,
    "began": "2026-01-02 03:04:05 +0000",
    "machine": "another boot pid:[1]",
    "started": "1",
}


class Clock:
    """Time that passes only while somebody sleeps; during(n) is called in the n-th sleep."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.during: Callable[[int], object] = lambda number: None
        clock = SimpleNamespace(
            monotonic=lambda: self.now, sleep=self._sleep, strftime=time.strftime
        )
        patch.setattr(module, "time", clock)

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept.append(seconds)
        self.during(len(self.slept))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / OWNER_NAME


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 30.0)  # the real one
    return Clock(monkeypatch)


def stat_words(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def test_what_a_claim_says(path: Path) -> None:
    assert path.name == ".mtp_export.owner"
    before = os.umask(0)
    try:
        owner = Owner(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == 0o666
    said = json.loads(path.read_bytes())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    began, attempt = said.pop("began"), said.pop("attempt")
    assert said == {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "machine": f"{boot} {os.readlink('/proc/self/ns/pid')}",
        "started": stat_words(os.getpid())[19],
    }
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", began)
    assert re.fullmatch("[0-9a-f]{16}", attempt)
    owner.release()
    again = Owner(path)
    assert json.loads(path.read_bytes())["attempt"] != attempt
    again.release()


def test_where_nothing_tells_machines_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A claim is watched, though a process here has its number."""
    real = Path.read_text

    def read_text(place: Path, *options: Any) -> str:
        if place.name == "boot_id":
            raise OSError(errno.ENOENT, "No such file")
        return real(place, *options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert re.fullmatch(rf"[0-9a-f]{{16}}-{os.getpid()}-\d+", process_mark())
    own = {"process": os.getpid(), "started": stat_words(os.getpid())[19]}
    path.write_text(json.dumps(ELSEWHERE | own | {"machine": ""}))
    owner = Owner(path)
    assert json.loads(path.read_bytes())["machine"] == ""
    assert sum(clock.slept) >= 30
    owner.release()


def test_a_claim_is_watched_for_half_a_minute_and_several_times(path: Path, clock: Clock) -> None:
    """An owner renews every five seconds (docs/distributed.md), and may be late a few times."""
    assert (module.RENEWAL_SECONDS, module.PATIENCE_SECONDS) == (5.0, 30.0)
    path.write_text(json.dumps(ELSEWHERE))
    Owner(path).release()
    assert 30 <= sum(clock.slept) < 35
    assert max(clock.slept) < 5


def test_an_owner_that_renews_late_is_alive(path: Path, clock: Clock) -> None:
    path.write_text(json.dumps(ELSEWHERE))
    clock.during = lambda number: os.utime(path, (5, 5)) if clock.now > 1028 else None
    with pytest.raises(OutputExistsError) as refusal:
        Owner(path)
    error = refusal.value
    assert error.what == "Another run is writing this output"
    assert error.where == path.parent
    assert error.found == (
        "process 4242 on node17, which began at 2026-01-02 03:04:05 +0000"
        " and still renews .mtp_export.owner there"
    )
    assert error.todo == "Wait for it to end, or end it there; or choose another --output-dir"
    assert json.loads(path.read_bytes()) == ELSEWHERE


def test_an_owner_that_ends_while_it_is_watched(path: Path, clock: Clock) -> None:
    path.write_text(json.dumps(ELSEWHERE))
    clock.during = lambda number: path.unlink() if number == 3 else None
    Owner(path).release()
    assert len(clock.slept) == 3


def test_a_claim_that_changed_while_it_was_watched_is_watched_anew(
    path: Path, clock: Clock
) -> None:
    """Another process has taken the dead one's folder over, and set the time back."""
    path.write_text(json.dumps(ELSEWHERE))
    os.utime(path, (5, 5))

    def replaced(number: int) -> None:
        if number == 2:
            path.write_text(json.dumps(ELSEWHERE | {"host": "node18"}))
            os.utime(path, (5, 5))
        elif clock.now > 1040:
            os.utime(path, (6, 6))

    clock.during = replaced
    with pytest.raises(OutputExistsError, match="on node18"):
        Owner(path)


def test_a_claim_that_goes_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner released it between two calls."""
    real, refusals = os.open, [FileExistsError(errno.EEXIST, "there")]

    def opening(place: Any, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT and refusals:
            raise refusals.pop()
        return real(place, flags, *mode)

    monkeypatch.setattr(os, "open", opening)
    owner = Owner(path)
    owner.check()
    owner.release()


def twice(real: Callable[..., None]) -> Callable[..., None]:
    """Unlinking in which another process is faster."""

    def unlink(place: Any) -> None:
        real(place)
        real(place)

    return unlink


def test_two_take_a_dead_owner_s_claim_away(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(json.dumps(ELSEWHERE))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", twice(os.unlink))
        owner = Owner(path)
    owner.check()
    owner.release()


def test_a_claim_that_could_not_be_written_is_gone_already(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(IoError, match="Input/output"):
        patch.setattr(os, "fsync", failing)
        patch.setattr(os, "unlink", twice(os.unlink))
        Owner(path)
    assert not path.exists()


def test_a_claim_that_cannot_be_removed_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends as it would have: the process's end shows that the claim is dead."""

    def failing(place: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    owner = Owner(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        owner.release()
    assert path.exists()


@pytest.mark.parametrize("taken", [b"", json.dumps(ELSEWHERE).encode(), None])
def test_the_words_to_a_run_that_was_taken_over(taken: bytes | None, path: Path) -> None:
    owner = Owner(path)
    owner.check()
    if taken is None:
        path.unlink()
    else:
        path.write_bytes(taken)
    with pytest.raises(OutputExistsError) as refusal:
        owner.check()
    error = refusal.value
    assert error.what == "Another run has taken this output over"
    assert (error.where, error.expected) == (path.parent, "to own it until the end")
    assert error.found == {
        b"": "an owner file that is damaged",
        None: "no owner",
    }.get(taken, "process 4242 on node17, which began at 2026-01-02 03:04:05 +0000")
    assert error.todo == "Let that run finish it; what this one finished before is kept"
    owner.release()


def test_a_released_claim_is_renewed_by_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.01)
    before = {*threading.enumerate()}
    owner = Owner(path)
    (thread,) = {*threading.enumerate()} - before
    owner.release()
    thread.join(20)
    assert not thread.is_alive()


def test_a_claim_that_could_not_be_read_once_is_renewed_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.01)
    real, failures = os.open, [OSError(errno.ESTALE, "Stale file handle")] * 3
    renewed = threading.Event()

    def opening(place: Any, flags: int, *mode: int) -> int:
        if threading.current_thread() is not threading.main_thread() and failures:
            raise failures.pop()
        return real(place, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        patch.setattr(os, "utime", lambda place: renewed.set())
        owner = Owner(path)
        assert renewed.wait(20)
        owner.release()
    assert not failures


def test_a_claim_has_a_length(path: Path) -> None:
    """An endless file in its place takes no memory."""
    claim = json.dumps(ELSEWHERE).encode()
    path.write_bytes(claim[:-1].ljust(4095) + b"}")
    assert str(owner_of(path.parent)).startswith("process 4242 on node17")
    path.write_bytes(claim[:-1].ljust(4096) + b"}")
    assert owner_of(path.parent) == "an owner file that is damaged"


def test_a_process_number_that_is_no_number(path: Path, clock: Clock) -> None:
    """It names no process, though a folder of /proc has that name."""
    own = Owner(path)
    said = json.loads(path.read_bytes())
    own.release()
    path.write_text(json.dumps(said | {"process": str(said["process"])}))
    Owner(path).release()
    path.write_text(json.dumps(said | {"process": "none", "started": None}))
    Owner(path).release()
    assert clock.slept == []


def test_a_process_is_told_by_its_start_whatever_its_name() -> None:
    name, mark = Path("/proc/self/comm"), process_mark()
    assert re.fullmatch(rf"[0-9a-f]{{16}}-{os.getpid()}-{stat_words(os.getpid())[19]}", mark)
    before = name.read_text()
    try:
        name.write_text("x) Z 1 (y")
        assert process_mark() == mark
        assert not has_ended(mark)
    finally:
        name.write_text(before)


@pytest.mark.parametrize(("state", "ended"), [("R", False), ("S", False), ("Z", True), ("X", True)])
def test_states_of_a_process(state: str, ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, real = process_mark(), Path.read_text

    def read_text(place: Path, *options: Any) -> str:
        if place.name != "stat":
            return real(place, *options)
        head, _, words = real(place).rpartition(")")
        return f"{head}) {state} {words.split(maxsplit=1)[1]}"

    monkeypatch.setattr(Path, "read_text", read_text)
    assert has_ended(mark) is ended
