"""Shards written in pieces: past the page cache or through it, the file's bytes are the same."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cases import export, make_checkpoint, tree
from mtp_export.checkpoint import writer
from mtp_export.checkpoint.plan import OutputTensor
from mtp_export.checkpoint.writer import ShardWriter, encode_header
from mtp_export.errors import IoError

SIZES = (1, 4095, 200_001, 16, 12_288, 4096, 3, 100_000)  # hardly a tensor begins at a page
TENSORS = [OutputTensor(f"t{i}", "U8", (size,)) for i, size in enumerate(SIZES)]
CONTENTS = {tensor.name: os.urandom(tensor.size_bytes) for tensor in TENSORS}
WAYS = ("direct", "refused at open", "refused at write", "short", "small")


class Disk:
    """os.open and os.pwrite, with a file system's ways; notes the direct writes."""

    def __init__(self, way: str, patch: pytest.MonkeyPatch) -> None:
        self.way, self.direct, self.places = way, set[int](), list[tuple[int, int]]()
        self._open, self._write = os.open, os.pwrite
        patch.setattr(writer, "MIN_DIRECT_BYTES", 1 << 30 if way == "small" else 1)
        patch.setattr(writer, "WRITE_BUFFER_BYTES", 8192)
        patch.setattr(os, "open", self.open)
        patch.setattr(os, "pwrite", self.write)

    def open(self, path: Any, flags: int, *more: Any, **options: Any) -> int:
        if self.way == "refused at open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        file = self._open(path, flags, *more, **options)
        (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(file)
        return file

    def write(self, file: int, data: memoryview, place: int) -> int:
        if file in self.direct:
            if self.way == "refused at write" or place % 512 or len(data) % 512:
                raise OSError(errno.EINVAL, "Invalid argument")
            self.places.append((place, len(data)))
            if self.way == "short":
                data = data[: 512 if len(data) > 512 else 100]
        return self._write(file, data, place)


def written(path: Path, piece_bytes: int) -> bytes:
    """Write a shard of the tensors, a piece of each in turn."""
    shard = ShardWriter(path, TENSORS)
    for start in range(0, max(SIZES), piece_bytes):
        for name, content in reversed(CONTENTS.items()):
            if piece := content[start : start + piece_bytes]:
                shard.write(name, memoryview(piece))
    shard.commit()
    return path.read_bytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("piece_bytes", [4096, 5003, 70_000, 1 << 20])
def test_every_byte_at_its_place(
    way: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(way, monkeypatch)
    head, _ = encode_header(TENSORS)
    assert written(tmp_path / "shard", piece_bytes) == head + b"".join(CONTENTS.values())
    assert bool(disk.places) == (way in ("direct", "short"))
    if way == "direct":
        assert all(place % 4096 == 0 and size % 4096 == 0 for place, size in disk.places)
        whole_pages = sum(size for _, size in disk.places)
        assert whole_pages > sum(SIZES) - 8192 * len(SIZES)


def test_a_disk_that_fails_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("direct", monkeypatch)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    shard = ShardWriter(tmp_path / "shard", TENSORS)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(IoError, match="filled up"):
        shard.write("t2", memoryview(CONTENTS["t2"]))
    shard.discard()
    assert disk.direct and not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["hf", "xllm", "paddlenlp"])
@pytest.mark.parametrize("way", WAYS[:3])
def test_an_export_is_the_same_however_it_writes(
    target: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source")
    options = ("--target", target, "--link", "copy")
    assert export(source, tmp_path / "cached", *options).code == 0
    Disk(way, monkeypatch)
    outcome = export(source, tmp_path / way, *options)
    assert outcome.code == 0, outcome.err
    assert tree(tmp_path / way) == tree(tmp_path / "cached")
