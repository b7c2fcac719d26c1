"""Owners of an output folder: a living one is respected though its lock is granted to everybody, a
dead one taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bundle.commands import UNFINISHED
from cases import export, tree
from mtp_checkpoints.errors import IoError, OutputExistsError
from mtp_export.bundle import owner as module
from mtp_export.bundle.journal import Journal, ShardFacts
from mtp_export.bundle.owner import OWNER_NAME, Owner, is_owned

ELSEWHERE = {
    "host": "node17",
    "process": 4242,
    "began": "2026-01-02 03:04:05 +0000",
    "machine": "another boot pid:[1]",
    "started": "1",
}


@pytest.fixture(autouse=True)
def lying_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grant every lock, as some shared file systems do, and be impatient."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 0.02)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.3)


@contextmanager
def renewed(path: Path) -> Iterator[None]:
    """Renew a claim, as its owner on another machine would."""
    ended = threading.Event()

    def renew() -> None:
        moment = 10**9
        while not ended.wait(0.02):
            moment += 1
            os.utime(path, ns=(moment, moment))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def claims(path: Path, **changes: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / OWNER_NAME).write_text(json.dumps(ELSEWHERE | changes))
    return path / OWNER_NAME


def test_a_living_owner_elsewhere(source: Path, unfinished: Path) -> None:
    path, before = claims(unfinished), tree(unfinished)
    with renewed(path):
        outcome = export(source, unfinished, *UNFINISHED)
    assert outcome.code == 8
    for word in ("process 4242 on node17", "2026-01-02 03:04:05", "Wait for it to end"):
        assert word in outcome.err
    assert tree(unfinished) == before | {OWNER_NAME: path.read_bytes()}


@pytest.mark.parametrize(
    "claim",
    [json.dumps(ELSEWHERE).encode(), b"", b"[1]", b"\xff\x00", b'{"host": "x"}'],
    ids=["elsewhere", "cut short", "a list", "no text", "half"],
)
def test_a_dead_owner_is_taken_over(claim: bytes, source: Path, unfinished: Path) -> None:
    (unfinished / OWNER_NAME).write_bytes(claim)
    assert export(source, unfinished, *UNFINISHED).code == 0
    assert not list(unfinished.rglob(".*"))


def test_a_dead_owner_of_this_machine_is_known_at_once(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 1e9)
    child = os.fork()
    if child == 0:
        output.mkdir()
        Owner(output / OWNER_NAME)
        os._exit(0)
    os.waitpid(child, 0)
    assert (output / OWNER_NAME).exists() and not is_owned(output)
    owner = Owner(output / OWNER_NAME)
    owner.check()
    assert is_owned(output)
    with pytest.raises(OutputExistsError, match=f"process {os.getpid()} on"):
        Owner(output / OWNER_NAME)
    owner.release()
    assert tree(output) == {} and not is_owned(output)


def test_the_number_of_a_dead_process_given_again(output: Path) -> None:
    """A later process is not the owner."""
    output.mkdir()
    owner = Owner(output / OWNER_NAME)
    said = json.loads((output / OWNER_NAME).read_bytes())
    owner.release()
    claims(output, **(said | {"started": "1"}))
    Owner(output / OWNER_NAME).release()
    claims(output, **said)
    with pytest.raises(OutputExistsError):
        Owner(output / OWNER_NAME)


def test_an_owner_renews_its_claim(output: Path) -> None:
    """In a thread that keeps no process from its end."""
    output.mkdir()
    before = {*threading.enumerate()}
    owner, path = Owner(output / OWNER_NAME), output / OWNER_NAME
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)
    os.utime(path, ns=(1, 1))
    ended = threading.Event()
    for _ in range(500):
        if path.stat().st_mtime_ns > 1:
            break
        ended.wait(0.02)
    else:
        pytest.fail("the claim was never renewed")
    owner.release()
    assert not path.exists()


def test_a_claim_that_could_not_be_renewed_once_is_renewed_later(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, renewals = [OSError(116, "Stale file handle")] * 3, list[Path]()

    def utime(path: Path) -> None:
        if failures:
            raise failures.pop()
        renewals.append(path)

    output.mkdir()
    monkeypatch.setattr(os, "utime", utime)
    owner = Owner(output / OWNER_NAME)
    ended = threading.Event()
    for _ in range(500):
        if len(renewals) > 1:
            break
        ended.wait(0.02)
    owner.release()
    assert not failures and set(renewals) == {output / OWNER_NAME}


def test_the_owner_of_a_folder_in_words(output: Path) -> None:
    output.mkdir()
    assert module.owner_of(output) is None
    owner = Owner(output / OWNER_NAME)
    said = module.owner_of(output)
    assert said is not None and said.startswith(f"process {os.getpid()} on ")
    owner.release()
    assert module.owner_of(output) is None
    claims(output, host="node9")
    words = "process 4242 on node9, which began at 2026-01-02 03:04:05 +0000"
    assert module.owner_of(output) == words
    (output / OWNER_NAME).write_bytes(b"{}")
    assert module.owner_of(output) == "an owner file that is damaged"


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync"])
def test_a_folder_that_takes_no_claim(
    call: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.mkdir()
    with monkeypatch.context() as patch, pytest.raises(IoError) as refusal:
        patch.setattr(os, call, failing)
        Owner(output / OWNER_NAME)
    assert refusal.value.where == output / OWNER_NAME
    assert refusal.value.found == "Read-only file system"
    assert tree(output) == {}


def failing(*arguments: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_process_that_nobody_has_waited_for_has_ended(output: Path) -> None:
    """Its parent may take hours to notice."""
    child = subprocess.Popen(["true"])
    stat = Path(f"/proc/{child.pid}/stat")
    while (words := stat.read_text().rpartition(")")[2].split())[0] != "Z":
        threading.Event().wait(0.01)
    machine = module.process_mark().split("-")[0]
    assert module.has_ended(f"{machine}-{child.pid}-{words[19]}")
    child.wait()


TAKEN: dict[str, Callable[[Path], object]] = {
    "by another": lambda path: path.write_text(json.dumps(ELSEWHERE)),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", TAKEN)
def test_a_run_that_was_taken_for_dead_records_nothing(how: str, output: Path) -> None:
    with Journal(output) as journal:
        journal.begin({"a": 1}, {"main/1"})
        journal.record("main/1", ShardFacts(1))
        before = journal.path.read_bytes()
        TAKEN[how](output / OWNER_NAME)
        with pytest.raises(OutputExistsError, match="taken this output over"):
            journal.record("main/2", ShardFacts(2))
        assert journal.path.read_bytes() == before
    assert (output / OWNER_NAME).exists() is (how == "by another")


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_an_owner_that_is_no_file(kind: str, source: Path, output: Path) -> None:
    output.mkdir()
    victim = output.with_name("victim")
    {"link": lambda path: path.symlink_to(victim), "folder": Path.mkdir}[kind](output / OWNER_NAME)
    with pytest.raises(IoError) as refusal:
        Owner(output / OWNER_NAME)
    assert refusal.value.where == output / OWNER_NAME
    assert not victim.exists()


def test_the_end_of_a_process_is_known_by_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    own = module.process_mark()
    assert not module.has_ended(own)
    machine, process, started = own.split("-")
    assert int(process) == os.getpid()
    assert module.has_ended(f"{machine}-{process}-{int(started) - 1}"), "an earlier one's number"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert module.has_ended(f"{machine}-{ended.pid}-5")
    for other in (f"{'0' * 16}-{ended.pid}-5", "", "x", f"{machine}-{process}", f"{own}-1"):
        assert not module.has_ended(other), other
    monkeypatch.setattr(module, "_machine", lambda: "")  # where nothing tells machines apart
    assert module.process_mark() != own
    assert not module.has_ended(module.process_mark()) and not module.has_ended(own)
