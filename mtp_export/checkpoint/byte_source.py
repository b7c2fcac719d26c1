"""Byte sources: the files of a checkpoint, wherever they lie.

Configs, indexes, headers and tensors are read through these protocols alone. Another kind of source
is one more implementation of them; local_folder.py has the one for folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class OpenFile(Protocol):
    """An open file. Its size and time of last change (ns) are those at the time of opening."""

    size_bytes: int
    modified_ns: int

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        ...

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into an aligned_buffer; return where in the buffer they are.

        Raises IoError when the bytes run out or cannot be read.
        """
        ...

    def close(self) -> None: ...


class ByteFile(Protocol):
    """A file of a source. Its path names it in messages; of a local file it is where it lies."""

    @property
    def path(self) -> Path: ...

    def open(self, once: range | None = None) -> OpenFile:
        """Open the file. once: the bytes of one tensor that will be read only once.

        Raises IoError, and InvalidInputError for what is no file of the source.
        """
        ...


class ByteSource(Protocol):
    """The files of one checkpoint by name. Its path names it in messages."""

    @property
    def path(self) -> Path: ...

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
