"""Pieces in which the bytes of a remote checkpoint are downloaded. Pure.

Bytes that lie close together are fetched with those between them, and long runs are cut: a request
costs a round trip, and a piece that is interrupted by the death of a run is downloaded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from mtp_checkpoints.sources.byte_source import RemoteFile

JOIN_BYTES = 1 << 20  # gaps up to this are downloaded too
PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class Extent:
    """Bytes [start, end) of a remote file that a job reads."""

    file: RemoteFile
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a remote file, downloaded as one; jobs are the keys of its readers."""

    file: RemoteFile
    start: int
    end: int
    jobs: frozenset[str]

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    @property
    def key(self) -> str:
        """Name that tells the content from every other piece's."""
        content = xxhash.xxh3_128_hexdigest(f"{self.file.path} {self.file.version}".encode())
        return f"{content}-{self.start}-{self.end}"


@dataclass(frozen=True)
class _Use:
    """An extent as one job reads it; order counts all reads of the run."""

    extent: Extent
    job: str
    order: int


def plan_pieces(jobs: Mapping[str, Sequence[Extent]]) -> tuple[Piece, ...]:
    """Return the pieces that hold all extents, in the order in which they are first read.

    jobs are in the order of the run, and so are the extents of a job.
    """
    by_file: dict[RemoteFile, list[_Use]] = {}
    order = 0
    for job, extents in jobs.items():
        for extent in extents:
            if extent.start < extent.end:
                by_file.setdefault(extent.file, []).append(_Use(extent, job, order))
            order += 1
    ordered: list[tuple[int, Piece]] = []
    for file, uses in by_file.items():
        for run in _runs(sorted(uses, key=lambda use: use.extent.start)):
            ordered += _cut(file, run)
    ordered.sort(key=lambda entry: (entry[0], entry[1].start))
    return tuple(piece for _, piece in ordered)


def _runs(uses: Sequence[_Use]) -> list[list[_Use]]:
    """Group uses, sorted by their start, into runs without a large gap."""
    runs: list[list[_Use]] = []
    reached = 0
    for use in uses:
        if not runs or use.extent.start > reached + JOIN_BYTES:
            runs.append([])
        runs[-1].append(use)
        reached = max(reached, use.extent.end)
    return runs


def _cut(file: RemoteFile, run: Sequence[_Use]) -> list[tuple[int, Piece]]:
    """Cut a run into equal pieces, each with the order of its first use."""
    start, end = run[0].extent.start, max(use.extent.end for use in run)
    step = -(-(end - start) // -(-(end - start) // PIECE_BYTES))
    pieces: list[tuple[int, Piece]] = []
    for first in range(start, end, step):
        last = min(first + step, end)
        inside = [use for use in run if use.extent.start < last and use.extent.end > first]
        jobs = frozenset(use.job for use in inside)
        # A piece that lies in a gap alone is of use to nobody.
        if inside:
            order = min(use.order for use in inside)
            pieces.append((order, Piece(file, first, last, jobs)))
    return pieces


def held_bytes(jobs: Sequence[str], pieces: Sequence[Piece], at_once: int) -> int:
    """Return the most bytes of pieces that are held while jobs run, some of them at once.

    A piece is held from the first of its jobs to the last.
    """
    place = {job: number for number, job in enumerate(jobs)}
    change = [0] * (len(jobs) + at_once + 1)
    for piece in pieces:
        uses = [place[job] for job in piece.jobs]
        change[min(uses)] += piece.size_bytes
        change[max(uses) + at_once] -= piece.size_bytes
    held = most = 0
    for difference in change:
        held += difference
        most = max(most, held)
    return most
