"""Files that are read from downloaded pieces, and pieces that somebody damages meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.sources.test_pieces import Listed
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.byte_source import RemoteFile
from mtp_checkpoints.sources.pieces import Piece
from mtp_checkpoints.sources.staged_file import StagedFile
from mtp_checkpoints.sources.staging import Staging, blocks

CONTENT = bytes(range(200))
FILE = Listed(Path("shard"), "1", len(CONTENT))


class Cut(Staging):
    """Pieces of 60 bytes in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for start in range(0, len(CONTENT), 60):
            (folder / str(start)).write_bytes(CONTENT[start : start + 60])

    def pieces_of(self, file: RemoteFile, start: int, end: int) -> list[Piece]:
        assert file == FILE and start < end
        starts = range(start // 60 * 60, end, 60)
        return [Piece(FILE, at, min(at + 60, len(CONTENT)), frozenset()) for at in starts]

    def path_of(self, piece: Piece) -> Path:
        return self.folder / str(piece.start)


@pytest.mark.parametrize("span", [(0, 200), (3, 5), (59, 61), (60, 120), (7, 7), (150, 200)])
def test_bytes_of_any_pieces(span: tuple[int, int], tmp_path: Path) -> None:
    staged = StagedFile(FILE, Cut(tmp_path))
    opened = staged.open()
    assert opened.read(*span) == CONTENT[slice(*span)]
    buffer = memoryview(bytearray(300))
    assert opened.read_into(buffer, *span) == slice(0, span[1] - span[0])
    assert bytes(buffer[: span[1] - span[0]]) == CONTENT[slice(*span)]
    assert (staged.path, staged.sha256) == (FILE.path, None)
    assert (opened.size_bytes, opened.version) == (200, "1")
    opened.close()


def test_a_piece_that_somebody_damaged(tmp_path: Path) -> None:
    opened = StagedFile(FILE, Cut(tmp_path)).open()
    (tmp_path / "60").write_bytes(CONTENT[60:100])
    assert opened.read(0, 100) == CONTENT[:100]
    shorter = "the file is shorter than it was"
    assert refusal(lambda: opened.read(0, 101)) == (tmp_path / "60", shorter)
    (tmp_path / "0").unlink()
    assert refusal(lambda: opened.read(0, 1)) == (tmp_path / "0", "No such file or directory")


def test_blocks_of_a_piece(tmp_path: Path) -> None:
    path = tmp_path / "piece"
    path.write_bytes(bytes(4 << 20) + CONTENT)
    assert [len(block) for block in blocks(path)] == [4 << 20, 200]
    assert refusal(lambda: list(blocks(tmp_path))) == (tmp_path, "Is a directory")


def refusal(action: Any) -> tuple[Any, Any]:
    with pytest.raises(IoError) as raised:
        action()
    assert raised.value.what == "A file cannot be read"
    return raised.value.where, raised.value.found
