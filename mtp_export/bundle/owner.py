"""Owner of a folder that is being written: a file beside its lock, since some shared file systems
grant a lock to everybody who asks.

While the owner lives, it renews the file. One that is not renewed any more is taken over: at once
where the owner is known to have ended, else after a while.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from mtp_checkpoints.errors import IoError, OutputExistsError
from mtp_checkpoints.sources.files import EXCLUSIVE_FILE, write_all, write_failure

OWNER_NAME = ".mtp_export.owner"
RENEWAL_SECONDS = 5.0
# Of a busy file server, a few renewals may be late.
PATIENCE_SECONDS = 30.0
_MAX_BYTES = 4096
_MARK = re.compile(r"([0-9a-f]{16})-([0-9]{1,9})-(\w+)")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Owner:
    """Claim of this process on a folder, renewed until it is released.

    Raises OutputExistsError when another process that is alive has it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._claim = _claim()
        self._released = threading.Event()
        while not self._make():
            taken = _content(path)
            if taken is None:
                continue
            if _is_alive(path, taken):
                raise _owned(path.parent, taken)
            if _content(path) == taken:  # nobody else has taken it over
                path.unlink(missing_ok=True)
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Refuse to go on when another process has taken the folder over (OutputExistsError)."""
        found = _content(self._path)
        if found != self._claim:
            raise OutputExistsError(
                "Another run has taken this output over",
                where=self._path.parent,
                expected="to own it until the end",
                found="no owner" if found is None else described(found),
                todo="Let that run finish it; what this one finished before is kept",
            )

    def release(self) -> None:
        """Give the folder up; one that another process has taken over stays that one's."""
        self._released.set()
        if _content(self._path) == self._claim:
            with suppress(OSError):
                self._path.unlink()

    def _make(self) -> bool:
        """Return whether nobody had the folder, which is this process's then (IoError)."""
        try:
            fd = os.open(self._path, EXCLUSIVE_FILE, 0o666)
        except FileExistsError:
            return False
        except OSError as error:
            raise write_failure(self._path, error) from error
        try:
            write_all(fd, self._claim, 0)
            os.fsync(fd)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise write_failure(self._path, error) from error
        finally:
            os.close(fd)
        return True

    def _renew(self) -> None:
        while not self._released.wait(RENEWAL_SECONDS):
            with suppress(OSError, IoError):  # a file that cannot be renewed shows in check()
                if _content(self._path) == self._claim:
                    os.utime(self._path)


def described(claim: bytes) -> str:
    """Return in words who made a claim."""
    said = _parsed(claim)
    if said is None:
        return "an owner file that is damaged"
    return f"process {said['process']} on {said['host']}, which began at {said['began']}"


def owner_of(folder: Path) -> str | None:
    """Return in words who has a folder; None if nobody does."""
    claim = _content(folder / OWNER_NAME)
    return None if claim is None else described(claim)


def is_owned(folder: Path) -> bool:
    """Return True while a process that is alive has a folder; one of another machine is waited for,
    as it renews its claim."""
    path = folder / OWNER_NAME
    claim = _content(path)
    return claim is not None and _is_alive(path, claim)


def _owned(folder: Path, claim: bytes) -> OutputExistsError:
    return OutputExistsError(
        "Another run is writing this output",
        where=folder,
        found=f"{described(claim)} and still renews {OWNER_NAME} there",
        todo="Wait for it to end, or end it there; or choose another --output-dir",
    )


def _claim() -> bytes:
    """Return the claim of this process: who it is, in words, and by what its death is known."""
    said = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": _machine(),
        "started": _started(os.getpid()),
        "attempt": secrets.token_hex(8),
    }
    return json.dumps(said).encode()


def process_mark() -> str:
    """Return a name of this process, by which others of its machine know when it has ended."""
    return f"{_machine_hash() or secrets.token_hex(8)}-{os.getpid()}-{_started(os.getpid())}"


def has_ended(mark: str) -> bool:
    """Return True for the name of a process of this machine that has ended."""
    match = _MARK.fullmatch(mark)
    if match is None or match[1] != _machine_hash():
        return False
    return str(_started(int(match[2]))) != match[3]


def _machine_hash() -> str:
    machine = _machine()
    return xxhash.xxh3_64_hexdigest(machine.encode()) if machine else ""


def _machine() -> str:
    """Return the running system and the namespace in which a process number means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> str | None:
    """Return when a process of this machine began, in ticks; None if it has ended.

    It tells a process from a later one that was given the same number.
    """
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]


def _content(path: Path) -> bytes | None:
    """Return a claim as it is on disk, asked of the file server; None if there is none."""
    try:
        fd = os.open(path, _READ)
        try:
            return os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_failure(path, error) from error


def _parsed(claim: bytes) -> Mapping[str, Any] | None:
    try:
        said = json.loads(claim)
        return said if said.keys() >= {"host", "process", "began", "machine", "started"} else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _is_alive(path: Path, claim: bytes) -> bool:
    """Return whether the process that made a claim lives: one of this machine is looked up, another
    one renews its file within some time."""
    said = _parsed(claim)
    if said is not None and said["machine"] and said["machine"] == _machine():
        process = said["process"]
        return isinstance(process, int) and _started(process) == said["started"]
    before, end = _renewed(path), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        time.sleep(min(RENEWAL_SECONDS, PATIENCE_SECONDS) / 5)
        now = _renewed(path)
        if now is None:
            return False
        if now != before:
            return True
    return False


def _renewed(path: Path) -> int | None:
    """Return when a file was renewed last, by the server's clock; None if it is gone."""
    try:
        fd = os.open(path, _READ)  # not the answer that a client remembers
    except OSError:
        return None
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
