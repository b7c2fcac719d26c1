"""A folder of a local file system as a byte source."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError, IoError
from mtp_checkpoints.sources.direct_io import MIN_DIRECT_BYTES, PAGE_BYTES, open_directly
from mtp_checkpoints.sources.files import check_small_file, read_failure

_DISTRUST = "Do not trust this checkpoint; get it again from its source"
_SPECIAL: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


@dataclass(frozen=True)
class LocalFolder:
    """A checkpoint's folder.

    Links in it may lead to what is below it or to the blobs of the Hub's download cache: whoever
    made a checkpoint must not choose files of this machine to be read, and copied into a bundle.
    """

    path: Path
    origin: Mapping[str, str] = field(default_factory=dict, init=False, kw_only=True)

    readers = 1

    def names(self, folder: str = "") -> frozenset[str]:
        inside = self.path / folder
        try:
            return frozenset(path.name for path in inside.iterdir() if not path.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        except OSError as error:
            raise read_failure(inside, error) from error

    def file(self, name: str) -> LocalFile:
        return LocalFile(self, name)

    def read(self, name: str) -> bytes:
        path = self.path / name
        if not os.path.lexists(path):
            raise InvalidInputError(
                "A file that every checkpoint has is missing",
                where=path,
                todo=_hint(path.parent),
            )
        with closing(self.file(name).open()) as file:
            check_small_file(path, file.size_bytes)
            return file.read(0, file.size_bytes)

    def resolved(self, name: str) -> Path:
        """Return the path of a file or folder without links.

        Raises InvalidInputError for a link that leads to nothing or out of the checkpoint.
        """
        path = self.path / name
        if path.parent == self.path and not path.is_symlink():
            return path
        real = Path(os.path.realpath(path))
        if not real.exists():
            raise InvalidInputError(
                "A link leads to no file",
                where=path,
                found=f"a link to {real}",
                todo="Download the file again",
            )
        if not any(real.is_relative_to(home) for home in self._homes):
            raise InvalidInputError(
                "A file leads out of the checkpoint",
                where=path,
                expected="a file in the folder, or one of the Hub's cache",
                found=f"a link to {real}",
                todo=f"{_DISTRUST}; or, if the link is yours, put the file itself there",
            )
        return real

    @cached_property
    def _homes(self) -> tuple[Path, ...]:
        """Folders below which the files may lie."""
        real = Path(os.path.realpath(self.path))
        return (real, *_hub_blobs(real))


def _hub_blobs(folder: Path) -> tuple[Path, ...]:
    """Return the folders that a snapshot of the Hub's cache links into; none for another folder.

    They are CACHE/models--NAME/blobs for CACHE/models--NAME/snapshots/REVISION, and, where that
    links on, CACHE/blobs.
    """
    for revision in (folder, *folder.parents):
        repository = revision.parent.parent
        if revision.parent.name == "snapshots" and repository.name.startswith("models--"):
            return (repository / "blobs", repository.parent / "blobs")
    return ()


def _hint(folder: Path) -> str:
    """Return where to point instead of a folder without a checkpoint."""
    snapshots = folder / "snapshots"
    if not (snapshots.is_dir() and folder.name.startswith("models--")):
        return "Point at the folder that holds config.json and the safetensors shards"
    commits = sorted(path.name for path in snapshots.iterdir())
    commit = commits[0] if len(commits) == 1 else "<commit>"
    return (
        "This is a repository in the Hub's download cache, and its files are in"
        f" {len(commits)} snapshots: point at {snapshots / commit}"
    )


@dataclass(frozen=True)
class LocalFile:
    """A file of a folder."""

    folder: LocalFolder
    name: str
    sha256: None = field(default=None, init=False)

    @cached_property
    def path(self) -> Path:
        return self.folder.path / self.name

    def open(self, once: range | None = None) -> OpenLocalFile:
        try:
            self._check_kind()
        except OSError as error:
            raise read_failure(self.path, error) from error
        return OpenLocalFile(self._resolved, once)

    @cached_property
    def _resolved(self) -> Path:
        return self.folder.resolved(self.name)

    def _check_kind(self) -> None:
        """Refuse a pipe or a device: reading one may never end (InvalidInputError)."""
        mode = os.stat(self._resolved).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidInputError(
                "A file of the checkpoint is no regular file",
                where=self.path,
                expected="a regular file, or a link to one",
                found=next((kind for is_kind, kind in _SPECIAL if is_kind(mode)), "a device"),
                todo=_DISTRUST,
            )


class OpenLocalFile:
    """An open local file.

    Bytes that are read once are read past the page cache, if they are many, not in it already, and
    the file system can.
    """

    def __init__(self, path: Path, once: range | None = None) -> None:
        self._path = path
        self._direct: FileIO | None = None
        self._is_direct = False
        try:
            self._file: FileIO = path.open("rb", buffering=0)
            stat = os.fstat(self._file.fileno())
            self.size_bytes, self.version = stat.st_size, stat.st_mtime_ns
            if once is not None and len(once) >= MIN_DIRECT_BYTES and not self._is_cached(once):
                self._bypass_cache()
        except OSError as error:
            raise read_failure(path, error) from error

    def close(self) -> None:
        self._file.close()
        if self._direct is not None:
            self._direct.close()

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        try:
            data = os.pread(self._file.fileno(), end - start, start)
        except OSError as error:
            raise read_failure(self._path, error) from error
        if len(data) < end - start:
            raise self._ends_at(start + len(data), end)
        return data

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into page_memory, SLACK_BYTES more of it; return where they are.

        Several threads may call it.
        """
        try:
            if self._is_direct and self._direct is not None:
                first = start // PAGE_BYTES * PAGE_BYTES
                try:
                    self._fill(self._direct, buffer, range(first, end), unit=PAGE_BYTES)
                    return slice(start - first, end - first)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._is_direct = False  # opened for direct reading, which is not supported
            self._fill(self._file, buffer, range(start, end))
        except OSError as error:
            raise read_failure(self._path, error) from error
        return slice(0, end - start)

    def read_cached(self, buffer: memoryview, start: int, end: int) -> slice | None:
        """Read as read_into what the page cache has; return None for anything else."""
        whole = slice(0, end - start)
        with suppress(OSError):  # those of waiting, and of file systems that cannot tell
            count = os.preadv(self._file.fileno(), [buffer[whole]], start, os.RWF_NOWAIT)
            return whole if count == end - start else None
        return None

    def _fill(self, file: FileIO, buffer: memoryview, span: range, unit: int = 1) -> None:
        """Read the bytes of a span into a buffer; lengths of reads are multiples of a unit."""
        size, done = len(span), 0
        room = -(-size // unit) * unit
        while done < size:
            count = os.preadv(file.fileno(), [buffer[done:room]], span.start + done)
            done += count
            if not count:
                raise self._ends_at(span.start + done, span.stop)

    def _ends_at(self, found: int, expected: int) -> IoError:
        return IoError(
            "A file ends early: it shrank while it was read",
            where=self._path,
            expected=f"at least {expected} bytes",
            found=f"{found} bytes",
            todo="Check that nothing else writes it, then run the same command again",
        )

    def _is_cached(self, once: range) -> bool:
        """Return whether the page cache has the bytes, judged by two of them.

        Asking for a byte brings it into the cache, so the next reader must ask for others.
        """
        byte = [bytearray(1)]
        try:
            for _ in range(2):
                os.preadv(self._file.fileno(), byte, random.choice(once), os.RWF_NOWAIT)
        except OSError as error:
            return error.errno != errno.EAGAIN
        return True

    def _bypass_cache(self) -> None:
        directly = open_directly(self._path, os.O_RDONLY)
        if directly is not None:
            self._direct, self._is_direct = FileIO(directly), True
