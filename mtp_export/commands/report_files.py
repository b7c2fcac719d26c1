"""Reports in files that a user names: each place is tried before the work, and written after it.

A regular file is replaced whole or not at all; where its path is a link, the file that it leads to.
Into a device, a pipe or an open descriptor such as /dev/stdout the report is written as it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mtp_checkpoints.errors import IoError, UsageError

_MOST_LINKS = 40  # as many as Linux follows


class _Place(Protocol):
    """A file that a report can be written to; every method raises OSError where it cannot."""

    def try_out(self) -> None:
        """Find out whether it can be written, and leave it as it is."""

    def write(self, data: bytes) -> None: ...


@dataclass(frozen=True)
class _RegularFile:
    """A file that is there or can be made; path is no link."""

    path: Path

    def try_out(self) -> None:
        temporary, descriptor = self._new_temporary()
        os.close(descriptor)
        temporary.unlink()

    def write(self, data: bytes) -> None:
        temporary, descriptor = self._new_temporary()
        try:
            with open(descriptor, "wb") as file:
                with suppress(OSError):  # a new file; or a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(self.path.stat().st_mode))
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _new_temporary(self) -> tuple[Path, int]:
        # A name that nobody can guess, and no link: the folder may be open to everybody.
        temporary = self.path.with_name(f".{secrets.token_hex(8)}.tmp")
        return temporary, os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


@dataclass(frozen=True)
class _Device:
    """A character device or a named pipe."""

    path: Path

    def try_out(self) -> None:
        # Opening a pipe would wait for its reader, and closing it would send that reader away.
        if not os.access(self.path, os.W_OK):
            raise PermissionError(None, "no permission to write to it")

    def write(self, data: bytes) -> None:
        with open(os.open(self.path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
            file.write(data)


@dataclass(frozen=True)
class _OpenDescriptor:
    """A descriptor that the program was started with, whatever it leads to."""

    number: int

    def try_out(self) -> None:
        if fcntl.fcntl(self.number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise PermissionError(None, "a descriptor that is open for reading only")

    def write(self, data: bytes) -> None:
        with open(os.dup(self.number), "wb") as file:
            file.write(data)


@dataclass(frozen=True)
class ReportFiles:
    """The reports that a command was asked for: path and place by option."""

    paths: Mapping[str, Path]
    places: Mapping[str, _Place]

    def write(self, texts: Mapping[str, Callable[[], str]]) -> None:
        """Write every report, from the texts by option.

        One that cannot be written does not keep the others from it (IoError for the first).
        """
        failures = []
        for option, place in self.places.items():
            data = texts[option]().encode("utf-8", "backslashreplace")
            try:
                place.write(data)
            except OSError as error:
                failures.append(_write_failure(self.paths[option], error))
        if failures:
            raise failures[0]


def try_reports(paths: Mapping[str, Path | None]) -> ReportFiles:
    """Try the places of reports, by option; None where the option is not given.

    Raises UsageError for a place that cannot be written.
    """
    asked = {option: path for option, path in paths.items() if path is not None}
    places: dict[str, _Place] = {}
    for option, path in asked.items():
        try:
            places[option] = _place_of(path)
            places[option].try_out()
        except OSError as error:
            raise _refusal(option, path, error.strerror or str(error)) from None
    return ReportFiles(asked, places)


def _refusal(option: str, path: Path, found: str) -> UsageError:
    return UsageError(
        "The report cannot be written there",
        where=path,
        expected="a file, in an existing folder outside the input and the output",
        found=found,
        todo=f"Choose another path for {option}",
    )


def _write_failure(path: Path, error: OSError) -> IoError:
    return IoError(
        "A report could not be written",
        where=path,
        found=error.strerror or str(error),
        todo="Only this report is missing: the command's work is done",
    )


def _place_of(path: Path) -> _Place:
    """Return the place that a path leads to (OSError where it is none)."""
    descriptor = _descriptor_of(path)
    if descriptor is not None:
        return _OpenDescriptor(descriptor)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _RegularFile(Path(os.path.realpath(path)))
    if stat.S_ISREG(mode):
        return _RegularFile(Path(os.path.realpath(path)))
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return _Device(path)
    kind = "a folder" if stat.S_ISDIR(mode) else "a block device or a socket"
    raise OSError(None, kind)


def _descriptor_of(path: Path) -> int | None:
    """Return the number of the open descriptor that a path such as /dev/fd/3 stands for."""
    own = os.path.realpath("/proc/self/fd")
    for _ in range(_MOST_LINKS):
        if re.fullmatch("[0-9]{1,9}", path.name) and os.path.realpath(path.parent) == own:
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None
