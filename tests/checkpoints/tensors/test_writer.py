"""Shards written in pieces: past the page cache or through it, the file's bytes are the same."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import export, tree
from mtp_checkpoints.containers.safetensors_header import file_layout
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources import disk_queue
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors import writer
from mtp_checkpoints.tensors.writer import ShardWriter

SIZES = (1, 4095, 200_001, 16, 12_288, 4096, 3, 100_000)  # hardly a tensor begins at a page
TENSORS = [OutputTensor(f"t{i}", DType.U8, (size,)) for i, size in enumerate(SIZES)]
CONTENTS = {tensor.name: os.urandom(tensor.size_bytes) for tensor in TENSORS}
WAYS = ("direct", "refused at open", "refused at write", "short", "small")


class Disk:
    """os.open and os.pwrite, with a file system's ways; notes the direct writes."""

    def __init__(self, way: str, patch: pytest.MonkeyPatch) -> None:
        self.way, self.direct, self.places = way, set[int](), list[tuple[int, int]]()
        self._open, self._write = os.open, os.pwrite
        patch.setattr(writer, "MIN_DIRECT_BYTES", 1 << 30 if way == "small" else 1)
        patch.setattr(writer, "SMALL_BYTES", 0)
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


@pytest.fixture
def queue() -> Iterator[DiskQueue]:
    with DiskQueue(3) as queue:
        yield queue


def written(path: Path, piece_bytes: int, queue: DiskQueue) -> bytes:
    """Write a shard of the tensors, a piece of each in turn."""
    shard = ShardWriter(path, file_layout(TENSORS), queue)
    for start in range(0, max(SIZES), piece_bytes):
        for name, content in reversed(CONTENTS.items()):
            if piece := content[start : start + piece_bytes]:
                shard.write(name, memoryview(piece))
    shard.commit()
    return path.read_bytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("piece_bytes", [4096, 5003, 70_000, 1 << 20])
def test_every_byte_at_its_place(
    way: str,
    piece_bytes: int,
    tmp_path: Path,
    queue: DiskQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(way, monkeypatch)
    head = file_layout(TENSORS).head
    assert written(tmp_path / "shard", piece_bytes, queue) == head + b"".join(CONTENTS.values())
    assert bool(disk.places) == (way in ("direct", "short"))
    if way == "direct":
        assert all(place % 4096 == 0 and size % 4096 == 0 for place, size in disk.places)
        whole_pages = sum(size for _, size in disk.places)
        assert whole_pages > sum(SIZES) - 8192 * len(SIZES)


def test_a_header_in_full() -> None:
    """As the safetensors library writes it: compact, padded with spaces to a multiple of eight."""
    tensors = [OutputTensor("é", DType.F32, (2, 3)), OutputTensor("b", DType.U8, ())]
    layout = file_layout(tensors)
    head, places = layout.head, {name: place.start for name, place in layout.places.items()}
    text = (
        '{"__metadata__":{"format":"pt"},'
        '"é":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"b":{"dtype":"U8","shape":[],"data_offsets":[24,25]}}'
    )
    raw = text.encode()
    assert head == (-(-len(raw) // 8) * 8).to_bytes(8, "little") + raw.ljust(-(-len(raw) // 8) * 8)
    assert places == {"é": len(head), "b": len(head) + 24}


def test_data_begin_at_a_multiple_of_eight() -> None:
    """And no further behind the header than that takes."""
    paddings = set()
    for count in range(1, 17):
        head = file_layout([OutputTensor("x" * count, DType.U8, (1,))]).head
        assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
        paddings.add(len(head) - len(head.rstrip(b" ")))
    assert paddings == set(range(8))


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_room_is_taken_before_the_first_byte(
    tmp_path: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    real = os.posix_fallocate

    def fallocate(fd: int, *span: int) -> None:
        asked.append(span)
        real(fd, *span)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    shard = ShardWriter(tmp_path / "shard", file_layout(TENSORS), queue)
    assert asked == [(0, shard.size_bytes)]
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size == shard.size_bytes == len(file_layout(TENSORS).head) + sum(SIZES)
    shard.discard()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(IoError, match=r"filled up while writing \(.*/shard\)"):
        ShardWriter(tmp_path / "shard", file_layout(TENSORS), queue)
    assert not list(tmp_path.iterdir())


def test_more_bytes_than_a_tensor_has(tmp_path: Path, queue: DiskQueue) -> None:
    """They would otherwise wait for room for ever."""
    shard = ShardWriter(tmp_path / "shard", file_layout(TENSORS), queue)
    name, content = next((name, content) for name, content in CONTENTS.items() if content)
    shard.write(name, memoryview(content))
    with pytest.raises(AssertionError, match=f"{name} has fewer bytes"):
        shard.write(name, memoryview(b"one more"))
    shard.discard()


def test_no_file_stays_open(
    tmp_path: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("direct", monkeypatch)
    opened = len(os.listdir("/proc/self/fd"))
    for end in (ShardWriter.commit, ShardWriter.discard):
        shard = ShardWriter(tmp_path / "shard", file_layout(TENSORS), queue)
        assert len(os.listdir("/proc/self/fd")) == opened + 2
        for name, content in CONTENTS.items():
            shard.write(name, memoryview(content))
        end(shard)
        assert len(os.listdir("/proc/self/fd")) == opened
        shard.discard()
    assert disk.direct and [path.name for path in tmp_path.iterdir()] == ["shard"]


@pytest.mark.parametrize(("more", "direct"), [(0, True), (1, False)])
@pytest.mark.parametrize("bound", ["MIN_DIRECT_BYTES", "SMALL_BYTES"])
def test_shards_from_a_size_on_bypass_the_cache(
    bound: str,
    more: int,
    direct: bool,
    tmp_path: Path,
    queue: DiskQueue,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the whole shard, or of its tensors on average."""
    disk = Disk("direct", monkeypatch)
    padding = -(len(file_layout(TENSORS).head) + sum(SIZES)) % len(SIZES)
    tensors = [OutputTensor("t0", DType.U8, (SIZES[0] + padding,)), *TENSORS[1:]]
    size = len(file_layout(tensors).head) + sum(tensor.size_bytes for tensor in tensors)
    assert size % len(tensors) == 0
    unit = size if bound == "MIN_DIRECT_BYTES" else size // len(tensors)
    monkeypatch.setattr(writer, bound, unit + more)
    shard = ShardWriter(tmp_path / "shard", file_layout(tensors), queue)
    for tensor in tensors:
        shard.write(tensor.name, memoryview(bytes(tensor.size_bytes)))
    shard.commit()
    assert bool(disk.places) is direct


@pytest.mark.parametrize("seen_by", ["write", "commit"])
def test_a_write_behind_that_fails_is_raised_by_the_next_call(
    seen_by: str, tmp_path: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk("direct", monkeypatch)
    shard = ShardWriter(tmp_path / "shard", file_layout(TENSORS), queue)
    monkeypatch.setattr(os, "pwrite", full)
    shard.write("t2", memoryview(CONTENTS["t2"])[:20_000])
    with pytest.raises(IoError, match=r"filled up while writing \(.*/shard\)"):
        if seen_by == "commit":
            shard.commit()
        for start in range(20_000, SIZES[2], 1_000):
            shard.write("t2", memoryview(CONTENTS["t2"])[start : start + 1_000])
    shard.discard()
    assert disk.direct and not list(tmp_path.iterdir())


def test_an_early_end_waits_for_what_is_being_written(
    tmp_path: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, writing, go = Disk("direct", monkeypatch), threading.Event(), threading.Event()
    closed: list[int] = []

    def slow(file: int, data: memoryview, place: int) -> int:
        writing.set()
        assert go.wait(20)
        assert not closed, "its descriptor may be another file's by now"
        return disk.write(file, data, place)

    shard = ShardWriter(tmp_path / "shard", file_layout(TENSORS), queue)
    real_close = os.close
    monkeypatch.setattr(os, "pwrite", slow)
    monkeypatch.setattr(os, "close", lambda file: (closed.append(file), real_close(file)))
    shard.write("t2", memoryview(CONTENTS["t2"])[:20_000])
    assert writing.wait(20)
    threading.Timer(0.05, go.set).start()
    shard.discard()
    assert len(closed) == 2 and not list(tmp_path.iterdir())


def test_memory_of_what_is_not_written_yet_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the disk: a writer waits, and what was written lends its memory again."""
    disk, made = Disk("direct", monkeypatch), list[int]()
    real = disk_queue.page_memory
    monkeypatch.setattr(disk_queue, "page_memory", lambda size: (made.append(size), real(size))[1])
    monkeypatch.setattr(writer, "WRITE_BUFFER_BYTES", 1 << 16)
    large = OutputTensor("large", DType.U8, (3 << 20,))
    with DiskQueue(2, 1 << 16) as queue:
        shard = ShardWriter(tmp_path / "shard", file_layout([large]), queue)
        shard.write("large", memoryview(bytes(large.size_bytes)))
        shard.commit()
    assert len(disk.places) > 10
    assert 0 < len([size for size in made if size > 1 << 16]) <= 2 + 1


@pytest.mark.parametrize("target", ["hf", "xllm", "paddlenlp"])
@pytest.mark.parametrize("way", WAYS[:3])
def test_an_export_is_the_same_however_it_writes(
    target: str,
    way: str,
    pristine: Path,
    output: Path,
    exported: Callable[[str], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = exported(target)
    Disk(way, monkeypatch)
    outcome = export(pristine, output, "--target", target, "--link", "copy")
    assert outcome.code == 0, outcome.err
    assert tree(output) == expected


@pytest.mark.parametrize(("small", "direct"), [(1, True), (1 << 16, False)])
def test_shards_of_small_tensors_are_not_written_directly(
    small: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by other threads."""
    disk, writes = Disk("direct", monkeypatch), list[object]()
    monkeypatch.setattr(writer, "SMALL_BYTES", small)
    tensors = [OutputTensor(f"t{number}", DType.U8, (20_000,)) for number in range(3)]
    with DiskQueue(2) as queue:
        real = queue.write
        monkeypatch.setattr(queue, "write", lambda action: (writes.append(action), real(action))[1])
        shard = ShardWriter(tmp_path / "shard", file_layout(tensors), queue)
        for tensor in tensors:
            shard.write(tensor.name, memoryview(CONTENTS["t2"][:20_000]))
        shard.commit()
    assert bool(disk.places) is bool(writes) is direct
    assert (tmp_path / "shard").read_bytes().endswith(3 * CONTENTS["t2"][:20_000])
