"""Journal of an unfinished run: one line per finished shard, with which the same command resumes.

It is in the output folder, locked by the run, and removed when the bundle is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from mtp_export.checkpoint.files import sync_folder, write_failure
from mtp_export.errors import OutputExistsError

JOURNAL_NAME = ".mtp_export.journal"
_SOURCE_FIELDS = ("source", "versions")  # fields of a run's identity


class Journal:
    """Journal of one output folder (created if need be), open and locked.

    Raises OutputExistsError when another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_NAME
        self.finished: dict[str, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("a+b")
        except OSError as error:
            raise write_failure(self.path, error) from error
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def is_empty(self) -> bool:
        """True when no run has begun here since the last one ended."""
        return os.fstat(self._file.fileno()).st_size == 0

    def resume(self, identity: Mapping[str, Any]) -> None:
        """Take over what an earlier run of the same identity finished.

        identity describes bundle and source as JSON. Raises OutputExistsError for another
        identity, naming the first field that differs, and for a journal that cannot be read.
        """
        self._file.seek(0)
        raw = self._file.read()
        end = raw.rfind(b"\n") + 1
        try:
            first, *lines = [json.loads(line) for line in raw[:end].splitlines()]
            recorded = first["identity"]
            finished = {line["finished"]: _checked(line["facts"]) for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise OutputExistsError(
                "The journal of the unfinished run is damaged",
                where=self.path,
                found=f"{type(error).__name__}: {error}",
                todo="Pass --no-resume to start over",
            ) from None
        _refuse_other(recorded, json.loads(json.dumps(identity)), self.path.parent)
        self._file.truncate(end)  # a line that a kill cut short
        self.finished = finished

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Start over, in a folder that has been cleared (IoError)."""
        self.finished = {}
        try:
            self._file.truncate(0)
            self._append({"identity": identity})
            sync_folder(self.path.parent)
        except OSError as error:
            raise write_failure(self.path, error) from error

    def record(self, key: str, facts: Mapping[str, Any]) -> None:
        """Record that a shard is finished and on disk (IoError)."""
        try:
            self._append({"finished": key, "facts": facts})
        except OSError as error:
            raise write_failure(self.path, error) from error
        self.finished[key] = dict(facts)

    def remove(self) -> None:
        """Remove the journal, and its folder when that holds nothing else."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._file.fileno()).st_ino == self.path.stat().st_ino:
                return
        except (BlockingIOError, FileNotFoundError):
            pass
        raise OutputExistsError(
            "Another run is writing this output, or has just finished it",
            where=self.path.parent,
            todo="Wait for it to end, or choose another --output-dir",
        )


def _checked(facts: Any) -> dict[str, Any]:
    """Return the facts recorded of a shard (KeyError, TypeError for others)."""
    if type(facts["size_bytes"]) is not int:
        raise TypeError("size_bytes is not a number")
    unread = "link" in facts and "xxh3_128" not in facts
    if not unread and not isinstance(facts["xxh3_128"], dict):
        raise TypeError("xxh3_128 holds no checksums")
    return dict(facts)


def _refuse_other(recorded: Any, wanted: Mapping[str, Any], folder: Path) -> None:
    if recorded == wanted:
        return
    before, now = _first_difference(recorded, wanted)
    source = {key: wanted[key] for key in _SOURCE_FIELDS if key in wanted}
    if isinstance(recorded, dict) and recorded | source == wanted:
        raise OutputExistsError(
            "The source changed since the unfinished run in this output folder began",
            where=folder,
            expected=before,
            found=now,
            todo="Pass --no-resume to start over",
        )
    raise OutputExistsError(
        "The output folder holds an unfinished run of something else",
        where=folder,
        expected=before,
        found=now,
        todo="Run the earlier command again to finish it, or pass --no-resume to start over",
    )


def _first_difference(before: Any, now: Any) -> tuple[str, str]:
    """Return the first pair of values in which two JSON values differ, in words."""
    path = ""
    while isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        key = next(key for key in keys if before.get(key) != now.get(key))
        path, before, now = f"{path}{key} ", before.get(key), now.get(key)
    return f"{path}{before} (in the unfinished run)", f"{path}{now} (now)"
