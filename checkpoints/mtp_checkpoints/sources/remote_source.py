"""Files of a remote checkpoint, listed once: of a repository of the Hub, or of an object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import sleep
from typing import Protocol

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Address, RemoteFile
from mtp_checkpoints.sources.files import check_small_file

READERS = 8  # transfers at once
# The first read of a file brings this much, or a thousandth of it, as most headers then need no
# second request.
_HEAD_BYTES = 80 << 10


class ListedFile(RemoteFile, Protocol):
    """A remote file that can be read whole, if it is small."""

    def whole(self) -> bytes:
        """Return the whole file (IoError)."""
        ...


@dataclass(frozen=True)
class RemoteSource:
    """Files by their paths below the source's own, as they were when the source was opened."""

    path: Address
    origin: Mapping[str, str]
    files: Mapping[str, ListedFile]

    readers = READERS

    def names(self, folder: str = "") -> frozenset[str]:
        prefix = f"{folder}/" if folder else ""
        below = (name.removeprefix(prefix) for name in self.files if name.startswith(prefix))
        return frozenset(name for name in below if "/" not in name)

    def file(self, name: str) -> ListedFile:
        if name in self.files:
            return self.files[name]
        raise InvalidInputError(
            "A file that every checkpoint has is missing",
            where=self.path / name,
            expected=name,
            found=f"{len(self.files)} other files",
            todo="Name the folder or revision that holds config.json and the safetensors shards",
        )

    def read(self, name: str) -> bytes:
        file = self.file(name)
        check_small_file(file.path, file.size_bytes)
        return file.whole()


class OpenRemoteFile:
    """A remote file, read by requests of its own."""

    def __init__(self, file: RemoteFile) -> None:
        self.file, self._head = file, b""
        self.size_bytes, self.version = file.size_bytes, file.version

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        if start == 0 and not self._head:
            ahead = min(_HEAD_BYTES, self.size_bytes // 1000)
            self._head = fetched(self.file, range(max(end, ahead)))
        known = self._head[start:end]
        return known + fetched(self.file, range(start + len(known), end))

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into a buffer; return where in it they are."""
        position = 0

        def put(chunk: bytes) -> None:
            nonlocal position
            buffer[position : position + len(chunk)] = chunk
            position += len(chunk)

        self.file.fetch(range(start, end), put, sleep)
        return slice(0, position)

    def read_cached(self, buffer: memoryview, start: int, end: int) -> slice | None:
        """Return None: every byte is asked for."""
        return None

    def close(self) -> None:
        """Do nothing: connections are kept by the client."""


def fetched(file: RemoteFile, span: range) -> bytes:
    """Return the bytes of a span of a remote file (IoError)."""
    data = bytearray()
    file.fetch(span, data.extend, sleep)
    return bytes(data)
