"""What an unfinished run has done: one line per finished shard, so that the same command goes on
where it stopped. Lives in the output folder, locked by the run, gone when the bundle is whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from mtp_export.checkpoint.writer import sync_folder, write_failure
from mtp_export.errors import OutputExistsError

JOURNAL_NAME = ".mtp_export.journal"


class Journal:
    """The journal of one output folder (made if need be), open and locked.

    identity says what is being made from what. A journal of another identity is refused with
    OutputExistsError that names the first field that differs, unless restart is set.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], restart: bool) -> None:
        self.path = folder / JOURNAL_NAME
        self._identity = json.loads(json.dumps(identity))
        self.finished: dict[str, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("a+b")
        except OSError as error:
            raise write_failure(self.path, error) from error
        try:
            self._lock()
            self.resumed = not restart and self._replay()
            if not self.resumed:
                self._begin()
        except OSError as error:
            self._file.close()
            raise write_failure(self.path, error) from error
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

    def record(self, key: str, facts: Mapping[str, Any]) -> None:
        """Note that something is finished and on disk."""
        try:
            self._append({"finished": key, "facts": facts})
        except OSError as error:
            raise write_failure(self.path, error) from error
        self.finished[key] = dict(facts)

    def remove(self) -> None:
        """Nothing is left to go on with; a folder that holds nothing else goes too."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    def _begin(self) -> None:
        self.finished.clear()
        self._file.truncate(0)
        self._append({"identity": self._identity})
        sync_folder(self.path.parent)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputExistsError(
                "Another run is writing this output",
                where=self.path.parent,
                todo="Wait for it to end, or choose another --output-dir",
            ) from None

    def _replay(self) -> bool:
        """Read what an earlier run noted; False when there is nothing to go on with."""
        self._file.seek(0)
        raw = self._file.read()
        end = raw.rfind(b"\n") + 1
        lines = [json.loads(line) for line in raw[:end].splitlines()]
        self._file.truncate(end)  # a line that a kill cut short
        if not lines:
            return False
        _refuse_other(lines[0]["identity"], self._identity, self.path.parent)
        for line in lines[1:]:
            self.finished[line["finished"]] = line["facts"]
        return True


def _refuse_other(noted: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    if noted == wanted:
        return
    keys = sorted(noted.keys() | wanted.keys())
    key = next(key for key in keys if noted.get(key) != wanted.get(key))
    before, now = _first_difference(noted.get(key), wanted.get(key))
    raise OutputExistsError(
        f"The output folder holds an unfinished run of something else: {key} differs",
        where=folder,
        expected=before,
        found=now,
        todo="Run the earlier command again to finish it, or pass --no-resume to start over",
    )


def _first_difference(before: Any, now: Any) -> tuple[str, str]:
    """The smallest differing pair inside two JSON values, in words."""
    path = ""
    while isinstance(before, dict) and isinstance(now, dict):
        keys = sorted(before.keys() | now.keys())
        key = next(key for key in keys if before.get(key) != now.get(key))
        path, before, now = f"{path}{key} ", before.get(key), now.get(key)
    return f"{path}{before} (in the unfinished run)", f"{path}{now} (now)"
