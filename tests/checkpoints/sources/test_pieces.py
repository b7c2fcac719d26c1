"""Pieces of a remote checkpoint hold every byte that is wanted, once, and few others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_checkpoints.sources import pieces
from mtp_checkpoints.sources.byte_source import OpenFile
from mtp_checkpoints.sources.pieces import Extent, held_bytes, plan_pieces

JOIN, PIECE = 10, 64


@dataclass(frozen=True)
class Listed:
    """A remote file of which only the identity matters."""

    path: Path
    version: str
    size_bytes: int = 1 << 20
    sha256: str | None = None

    def open(self, once: range | None = None) -> OpenFile:
        raise NotImplementedError

    def fetch(
        self, span: range, sink: Callable[[bytes], None], pause: Callable[[float], None]
    ) -> None:
        raise NotImplementedError


REAL = {name: getattr(pieces, name) for name in ("JOIN_BYTES", "PIECE_BYTES")}
FILES = [Listed(Path(name), name) for name in ("a", "b")]
EXTENTS = st.builds(
    lambda file, start, size: Extent(file, start, start + size),
    st.sampled_from(FILES),
    st.integers(0, 500),
    st.integers(0, 150),
)
JOBS = st.dictionaries(st.sampled_from(["x", "y", "z"]), st.lists(EXTENTS, max_size=6))


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> None:
    """Sizes at which a few hundred bytes are joined and cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "JOIN_BYTES", JOIN)
        patch.setattr(pieces, "PIECE_BYTES", PIECE)
        yield  # type: ignore[misc]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JOBS)
def test_every_wanted_byte_is_in_one_piece_of_its_jobs(jobs: dict[str, list[Extent]]) -> None:
    planned = plan_pieces(jobs)
    assert all(0 < piece.size_bytes <= PIECE for piece in planned)
    for file in FILES:
        owner: dict[int, frozenset[str]] = {}
        for piece in (piece for piece in planned if piece.file == file):
            for place in range(piece.start, piece.end):
                assert place not in owner
                owner[place] = piece.jobs
        wanted: set[int] = set()
        for job, extents in jobs.items():
            for extent in (extent for extent in extents if extent.file == file):
                wanted |= set(range(extent.start, extent.end))
                assert all(job in owner[place] for place in range(extent.start, extent.end))
        for place in owner:
            assert any(near in wanted for near in range(place - JOIN, place + JOIN + 1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JOBS)
def test_the_bytes_held_are_those_of_the_jobs_under_way(jobs: dict[str, list[Extent]]) -> None:
    planned = plan_pieces(jobs)
    total = sum(piece.size_bytes for piece in planned)
    largest = max((piece.size_bytes for piece in planned), default=0)
    assert largest <= held_bytes(list(jobs), planned, 1) <= total
    assert held_bytes(list(jobs), planned, len(jobs) or 1) == total


def test_pieces_come_in_the_order_of_their_use() -> None:
    late, early = Extent(FILES[0], 0, 10), Extent(FILES[0], 300, 310)
    planned = plan_pieces({"first": [early], "second": [late, early]})
    assert [(piece.start, piece.jobs) for piece in planned] == [
        (300, {"first", "second"}),
        (0, {"second"}),
    ]
    assert held_bytes(["first", "second"], planned, 1) == 20


def test_the_sizes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap of a megabyte is downloaded too, and a piece has at most 32 of them."""
    for name, size in REAL.items():
        monkeypatch.setattr(pieces, name, size)
    megabyte = 1 << 20
    for gap, count in ((megabyte, 1), (megabyte + 1, 2)):
        extents = [Extent(FILES[0], 0, 10), Extent(FILES[0], 10 + gap, 20 + gap)]
        assert len(plan_pieces({"job": extents})) == count
    for size, sizes in (
        (32 * megabyte, [32 * megabyte]),
        (32 * megabyte + 2, [16 * megabyte + 1] * 2),
    ):
        planned = plan_pieces({"job": [Extent(FILES[0], 3, 3 + size)]})
        assert [piece.size_bytes for piece in planned] == sizes


def test_bytes_are_held_from_the_first_job_to_the_last() -> None:
    jobs = {
        name: [Extent(FILES[0], at, at + 10)] for name, at in (("a", 0), ("b", 100), ("c", 200))
    }
    planned = plan_pieces(jobs)
    assert [held_bytes([*jobs], planned, at_once) for at_once in (1, 2, 3, 9)] == [10, 20, 30, 30]
    early = plan_pieces(jobs | {"c": [Extent(FILES[0], 0, 5)]})
    assert held_bytes([*jobs], early, 1) == 20
    assert held_bytes([], (), 1) == 0
