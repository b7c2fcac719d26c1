"""Journal of an unfinished run: one line per finished shard, with which the same command resumes.

It is in the output folder, or that of a share, which the run locks and owns, and is removed when
the bundle is whole. Its lines are JSON, each with a checksum of itself and all lines before it, so
that nothing that was edited or damaged reaches a manifest. Only the last line may be damaged, as a
run that was cut short leaves it: its shard is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import xxhash

from mtp_checkpoints.errors import OutputExistsError
from mtp_checkpoints.sources import strict_json
from mtp_checkpoints.sources.files import (
    make_folder,
    read_failure,
    sync_folder,
    write_all,
    write_failure,
    write_whole,
)
from mtp_export.bundle.options import Share
from mtp_export.bundle.owner import OWNER_NAME, Owner, owner_of
from mtp_export.plan import Facts
from mtp_export.schemes.calibrated import TEXT_FACTS

JOURNAL_NAME = ".mtp_export.journal"
_SOURCE_FIELDS = ("source", "versions")  # fields of a run's identity
_MAX_BYTES = 1 << 28  # twenty-five times that of a bundle of 671B parameters
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIGEST_BYTES = 16
_T = TypeVar("_T")


class DamagedJournal(Exception):
    """A journal that is not as this tool writes it; its argument says where."""


@dataclass(frozen=True)
class ShardFacts:
    """Facts of a finished shard, for the manifest: its link, if it is one, and by tensor the
    checksums, if it was read, and what its transform returned."""

    size_bytes: int
    link: str | None = None
    xxh3_128: Mapping[str, str] | None = None
    facts: Mapping[str, Facts] = field(default_factory=dict)


@dataclass
class JournalContent:
    """An unfinished run: its identity, the paths below the output folder that it writes or
    replaces, what it finished, by path, and the words of its command, as RunOptions has them."""

    identity: dict[str, Any]
    files: frozenset[str]
    finished: dict[str, ShardFacts] = field(default_factory=dict)
    command: Sequence[str] = ()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that say it."""
        head = {"identity": self.identity, "files": sorted(self.files)}
        yield head | {"command": list(self.command)}
        for key, facts in self.finished.items():
            yield shard_line(key, facts)

    def again(self, output: Path, share: Share | None = None) -> str:
        """Return the command that goes on with the run, for a shell; "" for a run that no command
        began, and one whose words cannot be shown. output is the folder of the bundle, share that
        of the work which the run makes."""
        if not self.command or not all(map(str.isprintable, self.command)):
            return ""
        divided = [] if share is None else ["--share", str(share)]
        words = ["mtp-export", *self.command, "--output-dir", str(output), *divided]
        return shlex.join(words)


class Journal:
    """Journal of one output folder (created if need be), open and locked.

    finished holds the facts of every finished shard, files the paths below the output folder that
    the run writes or replaces. Raises OutputExistsError when another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_NAME
        self.files: frozenset[str] = frozenset()
        self.finished: dict[str, ShardFacts] = {}
        self._checksum, self._end = xxhash.xxh3_128(), 0  # of the lines so far
        make_folder(folder)
        try:
            self._fd = os.open(self.path, _OPEN_FLAGS, 0o666)
        except OSError as error:
            raise write_failure(self.path, error) from error
        try:
            self._lock()
            self._owner = Owner(folder / OWNER_NAME)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner.release()
        os.close(self._fd)

    @property
    def is_empty(self) -> bool:
        """True when no run has begun here since the last one ended."""
        return os.fstat(self._fd).st_size == 0

    def resume(
        self, identity: Mapping[str, Any], output: Path | None = None, share: Share | None = None
    ) -> None:
        """Take over what an earlier run of the same identity finished.

        identity describes bundle and source as JSON. output is the folder of the bundle, by default
        the journal's, and share that of the work. Raises OutputExistsError for another identity,
        naming the first field that differs and the earlier command, and for a journal that is
        damaged.
        """
        try:
            content = parsed(_read(self.path))
        except DamagedJournal as damage:
            raise OutputExistsError(
                "The journal of the unfinished run is damaged",
                where=self.path,
                expected="the lines that an unfinished run of this version left",
                found=damage,
                todo="Pass --no-resume to start over",
            ) from None
        if content.identity != identity:
            folder = self.path.parent
            raise _other_run(content, identity, folder, content.again(output or folder, share))
        self._start(content)

    def begin(
        self, identity: Mapping[str, Any], files: Set[str], command: Sequence[str] = ()
    ) -> None:
        """Start over (IoError); nothing in the folder may have been touched yet.

        files are the paths below the folder that this run may remove or replace, command the words
        of its command, as RunOptions has them.
        """
        self._start(JournalContent(dict(identity), frozenset(files), command=command))

    def record(self, key: str, facts: ShardFacts) -> None:
        """Record that a shard is finished and on disk (IoError).

        Raises OutputExistsError when another run has taken the output over.
        """
        self._owner.check()
        checksum = self._checksum.copy()
        line = encoded(shard_line(key, facts), checksum)
        try:
            write_all(self._fd, line, self._end)  # over one that could not be written
            os.fsync(self._fd)
        except OSError as error:
            raise write_failure(self.path, error) from error
        self._end, self._checksum = self._end + len(line), checksum
        self.finished[key] = facts

    def remove(self) -> None:
        """Remove the journal, and its folder when that holds nothing else (IoError)."""
        try:
            self._owner.release()  # first: beside a whole bundle nobody would remove it
            sync_folder(self.path.parent)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise write_failure(self.path, error) from error
        # One that a power cut brings back only has the same command end the run once more.
        with suppress(OSError):
            sync_folder(self.path.parent)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _start(self, content: JournalContent) -> None:
        """Replace the journal by a whole one, and keep the lock."""
        checksum, before = xxhash.xxh3_128(), self._fd
        raw = b"".join(encoded(line, checksum) for line in content.lines())

        def write(fd: int) -> None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, raw, 0)
            self._fd = os.dup(fd)  # of the same open file, and so with its lock

        try:
            write_whole(self.path, write)
        finally:
            if self._fd != before:
                os.close(before)
        self.files, self.finished = content.files, dict(content.finished)
        self._checksum, self._end = checksum, len(raw)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OutputExistsError(
                "The journal of the unfinished run is no regular file",
                where=self.path,
                todo="Choose another --output-dir; this tool does not remove it",
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_ino == self.path.stat().st_ino:
                return
        except (BlockingIOError, FileNotFoundError):
            pass
        raise OutputExistsError(
            "Another run is writing this output, or has just finished it",
            where=self.path.parent,
            found=owner_of(self.path.parent) or "its lock",
            todo="Wait for it to end, or choose another --output-dir",
        )


def journaled(folder: Path) -> JournalContent | None:
    """Return what the journal of a folder says, whoever is writing it now: None without a journal
    or with one whose first line is damaged, nothing finished where a later one is (IoError)."""
    path = folder / JOURNAL_NAME
    if not path.is_file():
        return None
    with suppress(DamagedJournal):
        raw = _read(path)
        try:
            return parsed(raw)
        except DamagedJournal:
            return parsed(raw.partition(b"\n")[0] + b"\n")
    return None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise read_failure(path, error) from error
    if len(raw) > _MAX_BYTES:
        raise DamagedJournal(f"more than {_MAX_BYTES} bytes")
    return raw


def _other_run(
    content: JournalContent, wanted: Mapping[str, Any], folder: Path, again: str
) -> OutputExistsError:
    """Return the refusal to go on with a run of another identity. again: its command."""
    before, now = first_difference(content.identity, wanted)
    before, now = f"{before} (in the unfinished run)", f"{now} (now)"
    source = {key: wanted[key] for key in _SOURCE_FIELDS if key in wanted}
    if content.identity | source == wanted:
        return OutputExistsError(
            "The source changed since the unfinished run in this output folder began",
            where=folder,
            expected=before,
            found=now,
            todo="Pass --no-resume to start over",
        )
    return OutputExistsError(
        "The output folder holds an unfinished run of something else",
        where=folder,
        expected=before,
        found=now,
        todo="Pass --no-resume to start over, choose another --output-dir, or finish that run by"
        " its own command",
        command=again,
    )


def first_difference(before: Any, now: Any) -> tuple[str, str]:
    """Return the first pair of values in which two JSON values differ, in words."""
    path = ""
    while isinstance(before, dict) and isinstance(now, dict):
        pairs = {key: (before.get(key), now.get(key)) for key in before.keys() | now.keys()}
        unlike = [key for key in sorted(pairs) if pairs[key][0] != pairs[key][1]]
        # Without one they differ in a key whose value is null.
        key = min(unlike or before.keys() ^ now.keys())
        path, (before, now) = f"{path}{key} ", pairs[key]
    return f"{path}{before}", f"{path}{now}"


def shard_line(key: str, facts: ShardFacts) -> dict[str, Any]:
    """Return the line of a finished shard."""
    return {"finished": key, "facts": asdict(facts)}


def encoded(line: Mapping[str, Any], checksum: xxhash.xxh3_128) -> bytes:
    """Return the bytes of a line, and add it to the checksum of those before it."""
    raw = json.dumps(line, separators=(",", ":")).encode()
    checksum.update(raw)
    return b"%s %s\n" % (raw, checksum.hexdigest().encode())


def parsed(raw: bytes) -> JournalContent:
    """Return what a journal says, without a last line that was cut short (DamagedJournal)."""
    *whole, _ = raw.split(b"\n")
    checksum = xxhash.xxh3_128()
    content: JournalContent | None = None
    for number, line in enumerate(whole, 1):
        text, _, digest = line.rpartition(b" ")
        checksum.update(text)
        if digest != checksum.hexdigest().encode():
            if content is not None and number == len(whole):
                break
            raise DamagedJournal(f"line {number} with another checksum than its own")
        if content is None:
            content = _taken(_run, text, number)
        else:
            key, facts = _taken(_shard, text, number)
            content.finished[key] = facts
    if content is None:
        raise DamagedJournal("no whole line")
    return content


def _taken(take: Callable[[Any], _T], text: bytes, number: int) -> _T:
    try:
        return take(strict_json.parse(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"line {number} that this version did not write ({type(error).__name__}: {error})"
        raise DamagedJournal(found) from None


def _run(line: Any) -> JournalContent:
    files = frozenset(_typed(name, str) for name in _typed(line["files"], list))
    command = tuple(_typed(word, str) for word in _typed(line.get("command", []), list))
    return JournalContent(_typed(line["identity"], dict), files, command=command)


def _shard(line: Any) -> tuple[str, ShardFacts]:
    facts = ShardFacts(**line["facts"])
    _typed(facts.size_bytes, int)
    _typed(facts.link, str, type(None))
    for digest in _typed(facts.xxh3_128 or {}, dict).values():
        if len(bytes.fromhex(_typed(digest, str))) != _DIGEST_BYTES:
            raise ValueError("a checksum of another length")
    for figures in _typed(facts.facts, dict).values():
        for name, figure in _typed(figures, dict).items():
            _typed(figure, *((str,) if name in TEXT_FACTS else (int, float, type(None))))
    return _typed(line["finished"], str), facts


def _typed(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{type(value).__name__} in place of {types[0].__name__}")
    return value
