"""Pieces on disk: which are downloaded when, which of an earlier run are taken, and what goes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.byte_source import OpenFile
from mtp_checkpoints.sources.pieces import PIECE_BYTES, Piece
from mtp_checkpoints.sources.staging import (
    DOWNLOADS_NAME,
    Staging,
    Stopped,
    WholeFile,
    ahead_bytes,
    remove_downloads,
)

CONTENT = bytes(range(256)) * 4
STEP = 100


@dataclass(frozen=True)
class Host:
    """A remote file that answers when it is let, and counts."""

    path: Path = Path("model.safetensors")
    version: str = "1"
    sha256: str | None = None
    asked: list[range] = field(default_factory=list, compare=False)
    open_gate: threading.Event = field(default_factory=threading.Event, compare=False)
    failure: Exception | None = field(default=None, compare=False)

    @property
    def size_bytes(self) -> int:
        return len(CONTENT)

    def open(self, once: range | None = None) -> OpenFile:
        raise NotImplementedError

    def fetch(
        self, span: range, sink: Callable[[bytes], None], pause: Callable[[float], None]
    ) -> None:
        self.asked.append(span)
        while not self.open_gate.is_set():
            pause(0.01)
        if self.failure is not None:
            raise self.failure
        for place in range(span.start, span.stop, 30):
            sink(CONTENT[place : min(place + 30, span.stop)])


def pieces_of(host: Host, jobs: Sequence[str]) -> list[Piece]:
    """A piece for each job, one after the other."""
    return [
        Piece(host, number * STEP, (number + 1) * STEP, frozenset({job}))
        for number, job in enumerate(jobs)
    ]


@pytest.fixture
def host() -> Host:
    found = Host()
    found.open_gate.set()
    return found


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Staging]]:
    """Starts downloads; the run ends early at the end of the test."""
    running: list[Staging] = []

    def start(
        pieces: Sequence[Piece],
        jobs: Sequence[str] | None = None,
        whole: Mapping[str, Sequence[Any]] | None = None,
        readers: int = 1,
    ) -> Staging:
        wanted = [*dict.fromkeys(job for piece in pieces for job in sorted(piece.jobs))]
        staging = Staging(
            folder=tmp_path / DOWNLOADS_NAME,
            pieces=pieces,
            jobs=wanted if jobs is None else jobs,
            whole=whole or {},
            stopping=threading.Event(),
        )
        running.append(staging.start(readers))
        return staging

    yield start
    for staging in running:
        staging.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def name_of(piece: Piece, data: bytes) -> str:
    return f"{piece.key}.{xxhash.xxh3_128_hexdigest(data)}"


def bytes_of(piece: Piece) -> bytes:
    return CONTENT[piece.start : piece.end]


def test_pieces_come_whole_under_the_checksum_of_their_bytes(
    host: Host, started: Callable[..., Staging]
) -> None:
    pieces = pieces_of(host, "abc")
    staging = started(pieces)
    for piece in reversed(pieces):
        path = staging.path_of(piece)
        assert path.read_bytes() == bytes_of(piece)
        assert path.name == name_of(piece, bytes_of(piece))
    assert sorted(span.start for span in host.asked) == [0, STEP, 2 * STEP]


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came about")


def test_few_pieces_come_before_somebody_asks(
    host: Host, started: Callable[..., Staging], tmp_path: Path
) -> None:
    pieces = pieces_of(host, "abcdefg")
    staging = started(pieces, readers=1)
    wait_until(lambda: len(list((tmp_path / DOWNLOADS_NAME).glob("*[!l]"))) == 2)
    threading.Event().wait(0.25)
    assert [span.start for span in host.asked] == [0, STEP]
    assert staging.path_of(pieces[5]).read_bytes() == bytes_of(pieces[5])  # this one comes next
    assert [span.start for span in host.asked] == [0, STEP, 5 * STEP]
    staging.path_of(pieces[0])
    wait_until(lambda: len(host.asked) == 4)
    threading.Event().wait(0.25)
    assert host.asked[-1].start == 2 * STEP and len(host.asked) == 4
    assert ahead_bytes(3) == 9 * PIECE_BYTES


def test_what_an_earlier_run_left_is_taken_if_its_bytes_are_right(
    host: Host, started: Callable[..., Staging], tmp_path: Path
) -> None:
    folder = tmp_path / DOWNLOADS_NAME
    folder.mkdir()
    right, changed, short, twice, other = pieces = pieces_of(host, "abcde")
    (folder / name_of(right, bytes_of(right))).write_bytes(bytes_of(right))
    (folder / name_of(changed, bytes_of(changed))).write_bytes(bytes(STEP))
    cut = bytes_of(short)[:-1]
    (folder / name_of(short, cut)).write_bytes(cut)
    for data in (bytes_of(twice), b"x"):
        (folder / name_of(twice, data)).write_bytes(data)
    (folder / f"{other.key}.partial").write_bytes(bytes_of(other))
    stranger = name_of(replace(right, start=7), b"")
    (folder / stranger).touch()
    (folder / "notes").touch()
    staging = started(pieces, readers=5)
    for piece in pieces:
        assert staging.path_of(piece).read_bytes() == bytes_of(piece)
    asked = {span.start for span in host.asked}
    assert right.start not in asked and {changed.start, short.start, other.start} <= asked
    assert not (folder / stranger).exists() and (folder / "notes").exists()
    assert len(list(folder.iterdir())) == len(pieces) + 1


def test_a_piece_goes_with_the_last_job_that_reads_it(
    host: Host, started: Callable[..., Staging]
) -> None:
    both = Piece(host, 0, STEP, frozenset("ab"))
    alone = Piece(host, STEP, 2 * STEP, frozenset("b"))
    staging = started([both, alone])
    paths = [staging.path_of(piece) for piece in (both, alone)]
    with staging.finishing("a"):
        assert all(path.exists() for path in paths)
    assert [path.exists() for path in paths] == [True, True]
    with staging.finishing("b"):
        assert all(path.exists() for path in paths)
    assert [path.exists() for path in paths] == [False, False]


def test_a_piece_that_somebody_removed_needs_no_removal(
    host: Host, started: Callable[..., Staging]
) -> None:
    (piece,) = pieces = pieces_of(host, "a")
    staging = started(pieces)
    staging.path_of(piece).unlink()
    with staging.finishing("a"):
        pass
    assert staging.path_of(piece).read_bytes() == bytes_of(piece), "it comes again if it is wanted"


def test_only_the_jobs_to_be_done_count(host: Host, started: Callable[..., Staging]) -> None:
    pieces = pieces_of(host, "ab")
    shared = Piece(host, 2 * STEP, 3 * STEP, frozenset("ab"))
    staging = started([*pieces, shared], jobs=["b"])
    path = staging.path_of(shared)
    staging.path_of(pieces[1])
    assert pieces[0].start not in {span.start for span in host.asked}
    with staging.finishing("b"):
        pass
    assert not path.exists()


def test_pieces_of_a_span(host: Host, started: Callable[..., Staging]) -> None:
    pieces = pieces_of(host, "abc")
    staging = started([pieces[2], pieces[0], pieces[1]])
    for span, wanted in (
        ((0, 1), pieces[:1]),
        ((0, STEP), pieces[:1]),
        ((0, STEP + 1), pieces[:2]),
        ((STEP, 2 * STEP), pieces[1:2]),
        ((STEP - 1, 3 * STEP), pieces),
    ):
        assert staging.pieces_of(host, *span) == wanted
    with pytest.raises(AssertionError):
        staging.pieces_of(host, 0, 3 * STEP + 1)


def test_a_failure_reaches_every_reader(host: Host, started: Callable[..., Staging]) -> None:
    host = replace(host, failure=IoError("gone"))
    pieces = pieces_of(host, "ab")
    staging = started(pieces)
    for piece in pieces:
        with pytest.raises(IoError, match="gone"):
            staging.path_of(piece)


def test_a_disk_that_takes_no_piece(
    host: Host, started: Callable[..., Staging], tmp_path: Path
) -> None:
    (piece,) = pieces_of(host, "a")
    partial = tmp_path / DOWNLOADS_NAME / f"{piece.key}.partial"
    host.open_gate.clear()
    staging = started([piece])
    wait_until(lambda: bool(host.asked))
    partial.unlink()
    host.open_gate.set()
    with pytest.raises(IoError) as caught:
        staging.path_of(piece)
    assert caught.value.where == partial


def test_a_folder_that_cannot_be_made(host: Host, tmp_path: Path) -> None:
    (tmp_path / DOWNLOADS_NAME).touch()
    staging = Staging(tmp_path / DOWNLOADS_NAME, [], [], {}, threading.Event())
    with pytest.raises(IoError) as caught:
        staging.start(1)
    assert caught.value.where == tmp_path / DOWNLOADS_NAME


def test_a_run_that_stops_leaves_whole_pieces_alone(host: Host, tmp_path: Path) -> None:
    host.open_gate.clear()
    stopping = threading.Event()
    jobs = "abcdefghij"  # the last is beyond what is read ahead, however late the gate closes
    pieces = pieces_of(host, jobs)
    folder = tmp_path / DOWNLOADS_NAME
    staging = Staging(folder, pieces, jobs, {}, stopping).start(1)
    with pytest.raises(KeyboardInterrupt), staging:
        host.open_gate.set()
        staging.path_of(pieces[0])
        host.open_gate.clear()
        wait_until(lambda: len(host.asked) > 1)
        stopping.set()
        with pytest.raises(Stopped):
            staging.path_of(pieces[-1])
        raise KeyboardInterrupt
    assert folder.is_dir()
    whole = {name_of(piece, bytes_of(piece)) for piece in pieces}
    assert {path.name for path in folder.iterdir() if path.suffix != ".partial"} <= whole
    with Staging(folder, [], [], {}, threading.Event()).start(1):
        pass
    assert not folder.exists()


def test_wrong_bytes_of_a_whole_file_take_all_downloads_with_them(
    host: Host, tmp_path: Path
) -> None:
    listed = replace(host, sha256=hashlib.sha256(CONTENT[: 2 * STEP]).hexdigest())
    for sha256, works in ((listed.sha256, True), ("0" * 64, False)):
        file = replace(listed, sha256=sha256)
        pieces = [Piece(file, start, start + STEP, frozenset({"job"})) for start in (0, STEP)]
        staging = Staging(
            tmp_path / DOWNLOADS_NAME, pieces, ["job"], {"job": [file]}, threading.Event()
        )
        outcome: list[object] = []
        try:
            with staging.start(2):
                for piece in pieces:
                    staging.path_of(piece)
                with staging.finishing("job"):
                    outcome.append("finished")
        except IoError as error:
            outcome.append(error.what)
            assert (error.where, error.expected) == (file.path, f"SHA-256 {sha256}")
            assert error.found == listed.sha256 and error.todo
        words = "A downloaded shard does not have the checksum that its repository lists"
        assert outcome == ["finished" if works else words]
        assert not (tmp_path / DOWNLOADS_NAME).exists()


def test_what_is_removed_from_an_output(host: Host, tmp_path: Path) -> None:
    remove_downloads(tmp_path)  # there is nothing
    folder = tmp_path / DOWNLOADS_NAME
    folder.mkdir()
    (piece,) = pieces_of(host, "a")
    names = [name_of(piece, b"x"), f"{piece.key}.partial"]
    for name in (*names, f"{piece.key}.partia", f"{piece.key}.{'g' * 32}", "x"):
        (folder / name).touch()
    remove_downloads(tmp_path)
    assert len(list(folder.iterdir())) == 3
    for path in folder.iterdir():
        path.unlink()
    remove_downloads(tmp_path)
    assert not folder.exists()
    folder.mkdir()
    (folder / names[0]).mkdir()
    with pytest.raises(IoError) as caught:
        remove_downloads(tmp_path)
    assert caught.value.where == folder


def test_a_file_is_hashed_as_far_as_its_pieces_are_there(host: Host, tmp_path: Path) -> None:
    file = replace(host, sha256=hashlib.sha256(CONTENT[: 3 * STEP]).hexdigest())
    pieces = pieces_of(file, "abc")
    there: dict[Piece, Path] = {}
    asked: list[Piece] = []

    def path_of(piece: Piece) -> Path | None:
        asked.append(piece)
        return there.get(piece)

    def arrive(piece: Piece) -> None:
        there[piece] = tmp_path / str(piece.start)
        there[piece].write_bytes(bytes_of(piece))

    whole = WholeFile(file, pieces)
    arrive(pieces[1])
    whole.advance(path_of)
    assert asked == [pieces[0]]
    arrive(pieces[0])
    whole.advance(path_of)
    assert asked == [pieces[0], pieces[0], pieces[1], pieces[2]]
    for path in there.values():
        path.unlink()  # what was hashed is not read again
    arrive(pieces[2])
    assert whole.finish(lambda piece: there[piece]) is None
    other = WholeFile(replace(file, sha256="f" * 64), [])
    assert other.finish(lambda piece: there[piece]) is not None


def test_threads_that_download_end_with_the_run(host: Host, tmp_path: Path) -> None:
    """Or with the program, whatever they wait for."""
    before = set(threading.enumerate())
    host.open_gate.clear()
    pieces = pieces_of(host, "abc")
    staging = Staging(tmp_path / DOWNLOADS_NAME, pieces, "abc", {}, threading.Event())
    with pytest.raises(KeyboardInterrupt), staging.start(3):
        own = set(threading.enumerate()) - before
        assert [(thread.name, thread.daemon) for thread in own] == [("download", True)] * 3
        raise KeyboardInterrupt
    assert not own & set(threading.enumerate())


def test_files_are_hashed_as_their_pieces_come(
    host: Host, started: Callable[..., Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that one job reads whole, and before the job has read all of them."""
    file = replace(host, sha256=hashlib.sha256(CONTENT[: 2 * STEP]).hexdigest())
    other, hashed = replace(host, path=Path("other")), list[bytes]()
    real = WholeFile.advance

    def advance(whole: WholeFile, path_of: Any) -> None:
        def noted(piece: Piece) -> Path | None:
            path = path_of(piece)
            if path is not None:
                hashed.append(path.read_bytes())
            return path  # type: ignore[no-any-return]

        real(whole, noted)

    monkeypatch.setattr(WholeFile, "advance", advance)
    pieces = [Piece(one, start, start + STEP, frozenset("a"))
              for one in (file, other) for start in (0, STEP)]  # fmt: skip
    staging = started(pieces, whole={"a": [file]})
    wait_until(lambda: len(hashed) == 2)
    for piece in pieces:
        staging.path_of(piece)
    with staging.finishing("a"):
        assert hashed == [bytes_of(piece) for piece in pieces[:2]]


def test_one_thread_hashes_a_file_at_a_time(host: Host, tmp_path: Path) -> None:
    """Another one does not wait for it."""
    file, seen = replace(host, sha256=""), list[Piece]()
    pieces = pieces_of(file, "a")
    whole = WholeFile(file, pieces)

    def path_of(piece: Piece) -> None:
        seen.append(piece)
        if len(seen) == 1:
            thread = threading.Thread(target=whole.advance, args=(path_of,))
            thread.start()
            thread.join(20)
            assert not thread.is_alive()

    whole.advance(path_of)
    assert seen == pieces
    whole.advance(path_of)
    assert seen == pieces * 2
