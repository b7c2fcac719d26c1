"""Paths that a command reads and those that it writes, kept apart: nothing that is written may be,
contain or lie in anything that is read, or that is written besides."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.byte_source import Place


def refuse_overlaps(reads: Mapping[str, Place | None], writes: Mapping[str, Path | None]) -> None:
    """Refuse a path that is written where another has been given that it would damage.

    Paths are named by their options, or by what they are; None and remote places overlap nothing.
    They are compared as links lead to them, and by the identity of files and folders, so that a
    second mount and a hard link count too. Raises UsageError.
    """
    inputs = {name: place for name, place in reads.items() if isinstance(place, Path)}
    outputs = {name: path for name, path in writes.items() if path is not None}
    for name, path in outputs.items():
        for other, place in inputs.items():
            _check(name, path, other, place, is_read=True)
    for (name, path), (other, place) in combinations(outputs.items(), 2):
        _check(name, path, other, place, is_read=False)


def _check(name: str, path: Path, other: str, place: Path, *, is_read: bool) -> None:
    relation = _relation(path, place, is_read=is_read)
    if relation is not None:
        raise UsageError(
            "What a command writes must lie apart from what it reads, and from its other outputs",
            where=path,
            expected=f"{name} neither in {other} nor around it",
            found=f"{name} {relation} {place} ({other})",
            todo=f"Nothing was written. Choose another path for {name}",
        )


def _relation(path: Path, place: Path, *, is_read: bool) -> str | None:
    """Return how a written path meets another; None where it does not."""
    written, other = _Location(path), _Location(place)
    if is_read and other.is_stream:  # a terminal, or a pipe, may well be read and written
        return None
    if written.is_at(other):
        return "is"
    if written.is_in(other):
        return "lies in"
    if other.is_in(written):
        return "contains"
    if is_read and written.is_linked and other.holds_file(written):
        return "is a hard link to a file of"
    return None


class _Location:
    """A path as links lead to it, and what is there."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.status = _status(path)

    @property
    def is_stream(self) -> bool:
        """True for a terminal, a device or a pipe."""
        return self.status is not None and not (
            stat.S_ISREG(self.status.st_mode) or stat.S_ISDIR(self.status.st_mode)
        )

    @property
    def is_linked(self) -> bool:
        """True for a file that has several names."""
        status = self.status
        return status is not None and stat.S_ISREG(status.st_mode) and status.st_nlink > 1

    def is_at(self, other: _Location) -> bool:
        return self.path == other.path or self._has_identity_of(self.status, other)

    def is_in(self, other: _Location) -> bool:
        return any(
            parent == other.path or self._has_identity_of(_status(parent), other)
            for parent in self.path.parents
        )

    def holds_file(self, other: _Location) -> bool:
        """True for a folder in which a file has the identity of another."""
        return any(
            self._has_identity_of(_status(Path(folder, name)), other)
            for folder, _, names in os.walk(self.path)
            for name in names
        )

    @staticmethod
    def _has_identity_of(status: os.stat_result | None, other: _Location) -> bool:
        return (
            status is not None
            and other.status is not None
            and os.path.samestat(status, other.status)
        )


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError, ValueError):
        return path.stat()
    return None
