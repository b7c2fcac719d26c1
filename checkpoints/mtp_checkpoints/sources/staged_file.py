"""Files of a remote checkpoint, read from the pieces in which they were downloaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mtp_checkpoints.sources.byte_source import Place, RemoteFile
from mtp_checkpoints.sources.files import read_failure
from mtp_checkpoints.sources.remote_source import OpenRemoteFile
from mtp_checkpoints.sources.staging import Staging


@dataclass(frozen=True)
class StagedFile:
    """A remote file whose wanted bytes are read from where they are staged."""

    file: RemoteFile
    staging: Staging

    @property
    def path(self) -> Place:
        return self.file.path

    @property
    def sha256(self) -> str | None:
        return self.file.sha256

    def open(self, once: range | None = None) -> OpenStagedFile:
        return OpenStagedFile(self.file, self.staging)


class OpenStagedFile(OpenRemoteFile):
    """A staged file, open: its pieces are opened as they are read."""

    def __init__(self, file: RemoteFile, staging: Staging) -> None:
        super().__init__(file)
        self._staging = staging

    def read(self, start: int, end: int) -> bytes:
        """Return bytes [start, end), a few (IoError)."""
        data = bytearray(end - start)
        self.read_into(memoryview(data), start, end)
        return bytes(data)

    def read_into(self, buffer: memoryview, start: int, end: int) -> slice:
        """Read bytes [start, end) into a buffer; return where in it they are."""
        pieces = self._staging.pieces_of(self.file, start, end) if start < end else []
        for piece in pieces:
            first, last = max(start, piece.start), min(end, piece.end)
            target = buffer[first - start : last - start]
            _read_exactly(self._staging.path_of(piece), target, first - piece.start)
        return slice(0, end - start)


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
