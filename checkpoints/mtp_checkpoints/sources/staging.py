"""Downloads of a run: pieces of a remote checkpoint on disk, from shortly before they are read
until the output that they were read for is finished.

So a run that dies downloads again only what was in flight. A piece gets its name, with the checksum
of its bytes, when it is whole; what has another name, or other bytes, is not taken.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType

import xxhash

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.byte_source import RemoteFile
from mtp_checkpoints.sources.files import read_failure, write_failure
from mtp_checkpoints.sources.pieces import PIECE_BYTES, Piece

DOWNLOADS_NAME = ".mtp_export.downloads"
_AHEAD = 2  # pieces per reader that are downloaded before somebody asks for them
_WRITE_BYTES = 128 << 10  # smaller chunks, as TLS yields them, are written together
_PARTIAL = ".partial"
# Name of a piece: its key, then the checksum of its bytes once it is whole.
_NAME = re.compile(r"[0-9a-f]+-\d+-\d+\.([0-9a-f]{32}|partial)")
_POLL_SECONDS = 0.1
_BLOCK_BYTES = 4 << 20  # threads that hash long take turns less often


def remove_downloads(output: Path) -> None:
    """Remove what a run downloaded, and nothing else, from its output folder (IoError)."""
    folder = output / DOWNLOADS_NAME
    try:
        for path in _downloads(folder):
            path.unlink()
        with suppress(OSError):  # there is none, or it holds what somebody else put there
            folder.rmdir()
    except OSError as error:
        raise write_failure(folder, error) from error


def _downloads(folder: Path) -> list[Path]:
    """Return the pieces in a folder, whole or not."""
    return [path for path in folder.glob("*") if _NAME.fullmatch(path.name)]


def ahead_bytes(readers: int) -> int:
    """Return the most bytes that are downloaded before they are asked for."""
    return (_AHEAD + 1) * readers * PIECE_BYTES


class Stopped(Exception):
    """The run is stopping: another thread failed, or the user interrupted."""


def blocks(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a file in memory that the next ones reuse (IoError)."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
    except OSError as error:
        raise read_failure(path, error) from error


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


class _Stage(Enum):
    """Progress of a piece."""

    WANTED = "not downloaded, or dropped again"
    RUNNING = "being downloaded"
    LEFT = "left by an earlier run, its bytes not compared yet"
    READY = "whole"


@dataclass(eq=False)
class _Staged:
    """A piece, its file from LEFT on, and the jobs that are still to read it."""

    piece: Piece
    users: set[str]
    stage: _Stage = _Stage.WANTED
    path: Path = Path()

    def drop(self) -> None:
        """Remove the file."""
        self.stage = _Stage.WANTED
        with suppress(OSError):
            self.path.unlink()


class Staging:
    """Downloads of one run into a folder; a context manager that owns the threads.

    pieces are in the order of their first use; jobs are those that are still to be done, and the
    bytes of the other ones are dropped. whole: files that one job reads entirely, by its key: their
    checksums are compared. stopping is set when the run ends early.
    """

    def __init__(
        self,
        folder: Path,
        pieces: Sequence[Piece],
        jobs: Collection[str],
        whole: Mapping[str, Sequence[RemoteFile]],
        stopping: threading.Event,
    ) -> None:
        self._folder, self._stopping = folder, stopping
        needed = [piece for piece in pieces if not piece.jobs.isdisjoint(jobs)]
        self._staged = {piece.key: _Staged(piece, set(piece.jobs & set(jobs))) for piece in needed}
        self._by_file = _by_file(needed)
        self._whole = {
            job: {file: WholeFile(file, self._by_file[file][1]) for file in whole.get(job, ())}
            for job in jobs
        }
        self._queue = deque(self._staged.values())
        self._asked: deque[_Staged] = deque()  # somebody waits for these
        self._unread: set[str] = set()  # downloaded, or being so, though nobody has asked yet
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._distrusted = False  # wrong bytes came: others may have come the same way
        self._threads: list[threading.Thread] = []

    def start(self, readers: int) -> Staging:
        """Take over what an earlier run left, and begin to download."""
        self._most_unread = _AHEAD * readers
        try:
            self._folder.mkdir(exist_ok=True)
            self._take_over()
        except OSError as error:
            raise write_failure(self._folder, error) from error
        for _ in range(readers):
            thread = threading.Thread(target=self._work, name="download", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if kind is None or self._distrusted:
            remove_downloads(self._folder.parent)

    @contextmanager
    def finishing(self, job: str) -> Iterator[None]:
        """Compare the files that a job read whole; after the block, drop what only it read."""
        for file in self._whole[job].values():
            error = file.finish(self.path_of)
            if error is not None:
                self._distrusted = True
                raise error
        yield
        with self._changed:
            read = [staged for staged in self._staged.values() if job in staged.users]
            for staged in read:
                staged.users.remove(job)
            self._changed.notify_all()
        for staged in read:  # a disk may be slow to forget: no transfer waits for it
            if not staged.users and staged.stage in (_Stage.LEFT, _Stage.READY):
                staged.drop()

    def pieces_of(self, file: RemoteFile, start: int, end: int) -> list[Piece]:
        """Return the pieces that hold bytes [start, end) of a file, which are all wanted ones."""
        starts, pieces = self._by_file[file]
        touched = pieces[max(bisect_right(starts, start) - 1, 0) : bisect_right(starts, end - 1)]
        assert touched and touched[0].start <= start and touched[-1].end >= end, (
            f"{file.path}: {start}"
        )
        return touched

    def path_of(self, piece: Piece) -> Path:
        """Return the file of a piece once it is there; one that nobody fetches yet comes next."""
        staged = self._staged[piece.key]
        with self._changed:
            if piece.key in self._unread:
                self._unread.remove(piece.key)
                self._changed.notify_all()
            while staged.stage is not _Stage.READY:
                if self._failure is not None:
                    raise self._failure
                if self._stopping.is_set():
                    raise Stopped
                if staged.stage is _Stage.LEFT:
                    self._check(staged)
                    continue
                if staged.stage is _Stage.WANTED and staged not in self._asked:
                    self._asked.append(staged)
                    self._changed.notify_all()
                self._changed.wait(_POLL_SECONDS)
            return staged.path

    def _take_over(self) -> None:
        for path in _downloads(self._folder):
            staged = self._staged.get(path.stem)
            if path.suffix == _PARTIAL or staged is None or staged.stage is _Stage.LEFT:
                path.unlink()
            else:
                staged.stage, staged.path = _Stage.LEFT, path

    def _check(self, staged: _Staged) -> None:
        """Keep what an earlier run downloaded, if these are the bytes that it wrote."""
        digest, size_bytes = xxhash.xxh3_128(), 0
        for block in blocks(staged.path):
            digest.update(block)
            size_bytes += len(block)
        is_whole = size_bytes == staged.piece.size_bytes
        if is_whole and staged.path.suffix == f".{digest.hexdigest()}":
            staged.stage = _Stage.READY
        else:
            staged.drop()

    def _next(self) -> _Staged | None:
        """Wait for a piece to download; None when there is nothing more to do."""
        with self._changed:
            while not self._stopping.is_set() and self._failure is None:
                staged = self._choose()
                if staged is not None:
                    staged.stage = _Stage.RUNNING
                    return staged
                self._changed.wait(_POLL_SECONDS)
        return None

    def _choose(self) -> _Staged | None:
        """Return the next piece: one that is waited for, or the next one while few are unread."""
        while self._asked:
            staged = self._asked.popleft()
            if staged.stage is _Stage.WANTED:
                return staged
        while self._queue and len(self._unread) < self._most_unread:
            staged = self._queue.popleft()
            if staged.stage is _Stage.WANTED and staged.users:
                self._unread.add(staged.piece.key)
                return staged
        return None

    def _work(self) -> None:
        try:
            while (staged := self._next()) is not None:
                path = self._download(staged.piece)
                with self._changed:
                    staged.stage, staged.path = _Stage.READY, path
                    self._changed.notify_all()
                self._hash(staged.piece)
        except Stopped:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _hash(self, piece: Piece) -> None:
        """Hash what can be hashed of the piece's file, if a job reads it whole."""
        for job in piece.jobs & self._whole.keys():
            if piece.file in self._whole[job]:
                self._whole[job][piece.file].advance(self._path_if_ready)

    def _path_if_ready(self, piece: Piece) -> Path | None:
        staged = self._staged[piece.key]
        return staged.path if staged.stage is _Stage.READY and not self._stopping.is_set() else None

    def _download(self, piece: Piece) -> Path:
        """Download a piece and return its file."""
        partial = self._folder / f"{piece.key}{_PARTIAL}"
        digest = xxhash.xxh3_128()
        try:
            with partial.open("wb", buffering=_WRITE_BYTES) as file:

                def sink(chunk: bytes) -> None:
                    if self._stopping.is_set():
                        raise Stopped
                    digest.update(chunk)
                    file.write(chunk)

                piece.file.fetch(range(piece.start, piece.end), sink, self._pause)
            path = self._folder / f"{piece.key}.{digest.hexdigest()}"
            os.replace(partial, path)
        except OSError as error:
            raise write_failure(partial, error) from error
        return path

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise Stopped


def _by_file(pieces: Sequence[Piece]) -> dict[RemoteFile, tuple[list[int], list[Piece]]]:
    groups: dict[RemoteFile, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        groups.setdefault(piece.file, []).append(piece)
    return {file: ([piece.start for piece in group], group) for file, group in groups.items()}
