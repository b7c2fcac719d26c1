"""Files of a remote checkpoint, read from the pieces in which they were downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mtp_checkpoints.sources.byte_source import Place, RemoteFile
from mtp_checkpoints.sources.files import read_failure
from mtp_checkpoints.sources.pieces import Piece

_BLOCK_BYTES = 4 << 20  # threads that hash long take turns less often


class Pieces(Protocol):
    """Provider of pieces; both methods may wait, and raise what keeps a piece from coming."""

    def pieces_of(self, file: RemoteFile, start: int, end: int) -> list[Piece]: ...

    def path_of(self, piece: Piece) -> Path: ...


@dataclass(frozen=True)
class StagedFile:
    """A remote file whose wanted bytes are read from where they are staged."""

    file: RemoteFile
    staging: Pieces

    @property
    def path(self) -> Place:
        return self.file.path

    @property
    def sha256(self) -> str | None:
        return self.file.sha256

    def open(self, once: range | None = None) -> OpenStagedFile:
        return OpenStagedFile(self)


class OpenStagedFile:
    """A staged file, open: its pieces are opened as they are read."""

    def __init__(self, staged: StagedFile) -> None:
        self._staged = staged
        self.size_bytes, self.version = staged.file.size_bytes, staged.file.version

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        data = bytearray(end - start)
        self.read_into(memoryview(data), start, end)
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into a buffer; return where in it they are."""
        staging = self._staged.staging
        pieces = staging.pieces_of(self._staged.file, start, end) if start < end else []
        for piece in pieces:
            first, last = max(start, piece.start), min(end, piece.end)
            target = buffer[first - start : last - start]
            _read_exactly(staging.path_of(piece), target, first - piece.start)
        return slice(0, end - start)

    def read_cached(self, buffer: memoryview, start: int, end: int) -> slice | None:
        """Return None: pieces lie in files of their own."""
        return None

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _read_exactly(path: Path, target: memoryview, offset: int) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            while target:
                count = os.preadv(file.fileno(), [target], offset)
                if not count:
                    raise OSError(0, "the file is shorter than it was")
                target, offset = target[count:], offset + count
    except OSError as error:
        raise read_failure(path, error) from error


def blocks(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file in memory that the next ones reuse (IoError)."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
    except OSError as error:
        raise read_failure(path, error) from error
