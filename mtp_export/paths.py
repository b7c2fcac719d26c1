"""Paths that a command reads and those that it writes: each can be a path, and they are kept apart.
Nothing that is written may be, contain or lie in anything that is read, or that is written besides.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import combinations
from pathlib import Path

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.byte_source import Place

_NAME_BYTES, _PATH_BYTES = 255, 4095  # of Linux
_ROOM_BYTES = 512  # of a folder in what is written, and of a file's temporary name in that
_READ_DEPTH = 2  # a checkpoint's files are in its folder, a bundle's in those of its parts


def refuse_overlaps(reads: Mapping[str, Place | None], writes: Mapping[str, Path | None]) -> None:
    """Refuse a path that is written where another has been given that it would damage.

    Paths are named by their options, or by what they are; None and remote places overlap nothing.
    They are compared as links lead to them, and by the identity of files and folders, so that a
    second mount and a hard link count too; and so does what links in a folder lead to, as they do
    in the Hub's cache. Raises UsageError, also for a path that is too long to be one.
    """
    for paths, room_bytes in ((reads, 0), (writes, _ROOM_BYTES)):
        for name, path in paths.items():
            if isinstance(path, Path):
                _check_length(name, path, room_bytes)
    inputs = {name: _Location(place) for name, place in reads.items() if isinstance(place, Path)}
    outputs = {name: _Location(path) for name, path in writes.items() if path is not None}
    for name, written in outputs.items():
        for other, read in inputs.items():
            if not read.is_stream:  # a terminal, or a pipe, may well be read and written
                _check(name, written, other, read, _damage(written, read))
    for (name, written), (other, place) in combinations(outputs.items(), 2):
        _check(name, written, other, place, _relation(written, place))


def refuse_unprintable(path: Path) -> None:
    """Refuse a folder whose path is not UTF-8: no command that names it could be printed
    (UsageError)."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "The path of the bundle is not UTF-8",
            where=path,
            expected="a path that can be printed in the command that serves the bundle",
            todo="Choose another path; no bundle was written or changed",
        ) from None


def _check_length(name: str, path: Path, room_bytes: int) -> None:
    """Refuse a path with a name that is too long, or that leaves too little room for others below
    it (UsageError)."""
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    whole, most = len(os.fsencode(os.path.abspath(path))), _PATH_BYTES - room_bytes
    if longest <= _NAME_BYTES and whole <= most and not _is_too_long(path):
        return
    raise UsageError(
        f"The path of {name} is too long",
        where=path,
        expected=f"names of at most {_NAME_BYTES} bytes, or fewer where the file system says so,"
        f" and at most {most} bytes in all",
        found=f"File name too long: {longest} bytes, {whole} in all",
        todo=f"Nothing was written. Choose another path for {name}",
    )


def _is_too_long(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def _check(
    name: str, written: _Location, other: str, place: _Location, relation: str | None
) -> None:
    if relation is not None:
        raise UsageError(
            "What a command writes must lie apart from what it reads, and from its other outputs",
            where=written.given,
            expected=f"{name} neither in {other} nor around it",
            found=f"{name} {relation} {place.given} ({other})",
            todo=f"Nothing was written. Choose another path for {name}",
        )


def _damage(written: _Location, read: _Location) -> str | None:
    """Return how a written path meets one that is read; None where it does not."""
    relation = _relation(written, read)
    if relation is not None:
        return relation
    for folder, is_whole in read.linked:
        relation = _relation(written, folder)
        if relation is not None and (is_whole or relation != "lies in"):
            return f"{relation} what a link leads to in"
    if written.is_file and (written.is_hard_linked or read.linked) and read.holds_file(written):
        return "is by a link a file of"
    return None


def _relation(written: _Location, other: _Location) -> str | None:
    if written.is_at(other):
        return "is"
    if written.is_in(other):
        return "lies in"
    return "contains" if other.is_in(written) else None


class _Location:
    """A path as it is given and as links lead to it, and what is there."""

    def __init__(self, path: Path) -> None:
        self.given = path
        self.path = Path(os.path.realpath(path))
        self.status = _status(path)

    @property
    def is_stream(self) -> bool:
        """True for a terminal, a device or a pipe."""
        return self.status is not None and not (
            stat.S_ISREG(self.status.st_mode) or stat.S_ISDIR(self.status.st_mode)
        )

    @property
    def is_file(self) -> bool:
        return self.status is not None and stat.S_ISREG(self.status.st_mode)

    @property
    def is_hard_linked(self) -> bool:
        """True for a file that has several names."""
        return self.status is not None and self.status.st_nlink > 1

    @cached_property
    def parents(self) -> Sequence[tuple[Path, os.stat_result | None]]:
        """The folders that it is in, and what is there."""
        return [(parent, _status(parent)) for parent in self.path.parents]

    @cached_property
    def linked(self) -> Sequence[tuple[_Location, bool]]:
        """Folders that links in this one lead to, and those of files that they lead to (False)."""
        links = dict.fromkeys(_links_in(str(self.path), _READ_DEPTH))
        return [(_Location(Path(folder)), is_whole) for folder, is_whole in links]

    def is_at(self, other: _Location) -> bool:
        return self._is_of(other.path, other.status)

    def is_in(self, other: _Location) -> bool:
        return any(other._is_of(*parent) for parent in self.parents)

    def holds_file(self, other: _Location) -> bool:
        """True for a folder in which a file has the identity of another."""
        return any(other._is_of(path, _status(path)) for path in _files_in(self.path, _READ_DEPTH))

    def _is_of(self, path: Path, status: os.stat_result | None) -> bool:
        if self.path == path:
            return True
        return (
            self.status is not None and status is not None and os.path.samestat(self.status, status)
        )


def _files_in(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the files and links in a folder, and in those in it."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)
            elif depth > 1:
                yield from _files_in(Path(entry.path), depth - 1)


def _links_in(folder: str, depth: int) -> Iterator[tuple[str, bool]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink():
                if depth > 1 and entry.is_dir():
                    yield from _links_in(entry.path, depth - 1)
                continue
            target = os.path.join(folder, os.readlink(entry.path))
            if os.path.islink(target):
                target = os.path.realpath(target)
            is_folder = os.path.isdir(target)
            yield (target if is_folder else os.path.dirname(target)), is_folder


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError, ValueError):
        return path.stat()
    return None
