"""Byte sources: the files of a checkpoint, wherever they are.

Configs, indexes, headers and tensors are read through these protocols alone. local_folder.py has
the source for folders, hub.py the one for repositories of the Hugging Face Hub; sources.py chooses
between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from mtp_checkpoints.errors import UnsupportedError


class Place(Protocol):
    """Place of a source or a file, as messages show it: a Path, or the Address of a remote one."""

    @property
    def name(self) -> str: ...

    def __truediv__(self, name: str, /) -> Place: ...


@dataclass(frozen=True)
class Address:
    """Address of something that is not in the file system: hf://org/name@revision/file."""

    text: str

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.text.rpartition("/")[2]

    def __truediv__(self, name: str, /) -> Address:
        return Address(f"{self.text.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.text


def local_path(place: Place) -> Path:
    """Return the path of a local file or folder (UnsupportedError for a remote one)."""
    if isinstance(place, Path):
        return place
    raise UnsupportedError(
        "This takes a local file or folder",
        where=place,
        todo="Download it first, or leave the option out that asks for it",
    )


class OpenFile(Protocol):
    """An open file, with its size at the time of opening."""

    size_bytes: int

    @property
    def version(self) -> int | str:
        """Mark that tells its content from another one's, at the time of opening: the last change
        (ns) of a local file, a checksum of a remote one."""
        ...

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        ...

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into page_memory, SLACK_BYTES more of it; return where they are.

        Raises IoError when the bytes run out or cannot be read.
        """
        ...

    def read_cached(self, buffer: memoryview, start: int, end: int) -> slice | None:
        """Read as read_into what is in memory already; return None where there is something to
        wait for, or to raise."""
        ...

    def close(self) -> None: ...


class ByteFile(Protocol):
    """A file of a source. Its path names it in messages; of a local file it is where it lies.

    sha256 is the checksum of the whole file, where its host lists one.
    """

    @property
    def path(self) -> Place: ...

    @property
    def sha256(self) -> str | None: ...

    def open(self, once: range | None = None) -> OpenFile:
        """Open the file. once: the bytes of one tensor that will be read only once.

        Raises IoError, and InvalidInputError for what is no file of the source.
        """
        ...


@runtime_checkable
class RemoteFile(ByteFile, Protocol):
    """A file that has to be downloaded; its content never changes while it has this version."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def version(self) -> str: ...

    def fetch(
        self, span: range, sink: Callable[[bytes], None], pause: Callable[[float], None]
    ) -> None:
        """Give sink the bytes of a span in order, whatever interrupts the transfer (IoError).

        pause waits a number of seconds between attempts. Both may raise to end the transfer.
        """
        ...


class ByteSource(Protocol):
    """The files of one checkpoint by name. Its path names it in messages.

    origin is what identifies it beside its files (of a repository its name and commit), readers the
    number of files that are best opened at once.
    """

    @property
    def path(self) -> Place: ...

    @property
    def origin(self) -> Mapping[str, str]: ...

    @property
    def readers(self) -> int: ...

    def names(self, folder: str = "") -> frozenset[str]:
        """Return the names of all files, or of those in a folder of the source.

        Those in folders below are not included; a folder that is missing holds none.
        """
        ...

    def file(self, name: str) -> ByteFile:
        """Return a file by its name, or its path below; without looking whether it is there."""
        ...

    def read(self, name: str) -> bytes:
        """Return a whole small file.

        Raises InvalidInputError for one that is missing or too large (check_small_file), IoError.
        """
        ...
