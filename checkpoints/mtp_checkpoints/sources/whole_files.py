"""Checksums of files that are downloaded whole, in pieces that come in any order."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.byte_source import RemoteFile
from mtp_checkpoints.sources.pieces import Piece
from mtp_checkpoints.sources.staged_file import blocks


class WholeFile:
    """SHA-256 of a file: each piece is hashed as soon as it and those before it are there.

    So little is left to hash when the last one comes. Any thread may call both methods.
    """

    def __init__(self, file: RemoteFile, pieces: Sequence[Piece]) -> None:
        self._file, self._left = file, deque(pieces)
        self._digest = hashlib.sha256()
        self._hashing = threading.Lock()

    def advance(self, path_of: Callable[[Piece], Path | None]) -> None:
        """Hash the next pieces whose files are there, unless another thread is at it."""
        if self._hashing.acquire(blocking=False):
            try:
                self._hash(path_of)
            finally:
                self._hashing.release()

    def finish(self, path_of: Callable[[Piece], Path]) -> IoError | None:
        """Hash the rest; return the error of a checksum that is not the one that the host lists."""
        with self._hashing:
            self._hash(path_of)
        if self._digest.hexdigest() == self._file.sha256:
            return None
        return IoError(
            "A downloaded shard does not have the checksum that its repository lists",
            where=self._file.path,
            expected=f"SHA-256 {self._file.sha256}",
            found=self._digest.hexdigest(),
            todo="Run the same command again: it downloads again what was not finished",
        )

    def _hash(self, path_of: Callable[[Piece], Path | None]) -> None:
        while self._left and (path := path_of(self._left[0])) is not None:
            for block in blocks(path):
                self._digest.update(block)
            self._left.popleft()
