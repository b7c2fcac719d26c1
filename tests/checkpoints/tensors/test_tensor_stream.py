"""Tensors read ahead of their use: past the page cache or through it, the bytes are the file's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.tensors.test_tensor_reader import CONTENT, SIZE, WAYS, prepare
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.local_folder import LocalFolder, OpenLocalFile
from mtp_checkpoints.tensors.tensor_stream import TensorStream

BLOCK = 8192


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=[1, 3])
def queue(request: pytest.FixtureRequest) -> Iterator[DiskQueue]:
    with DiskQueue(request.param, BLOCK) as queue:
        yield queue


def tensor(
    path: Path, offset: int, *shape: int, dtype: str = "U8", item_bytes: int = 1
) -> TensorInfo:
    size = item_bytes
    for length in shape:
        size *= length
    file = LocalFolder(path.parent).file(path.name)
    return TensorInfo("x", DType[dtype], shape, file, offset, size)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 1, 4096, 5003, SIZE - 4097])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 200_000])
def test_every_byte_in_order(
    way: str, offset: int, size: int, file: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = min(size, SIZE - offset)
    opened = prepare(way, monkeypatch)
    with TensorStream(tensor(file, offset, size), queue) as stream:
        blocks = [bytes(block) for block in stream.blocks()]
    assert b"".join(blocks) == CONTENT[offset : offset + size]
    assert {len(block) for block in blocks[:-1]} <= {BLOCK}, "two tensors can be compared"
    if way == "direct" and size:
        assert opened == [os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 2, 4096, 5003])
@pytest.mark.parametrize("unit", [1, 7, 100, 500])
def test_rows_of_any_dtype_at_any_offset(
    way: str, offset: int, unit: int, file: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they lie in several blocks."""
    prepare(way, monkeypatch)
    info = tensor(file, offset, 500, 33, dtype="F32", item_bytes=4)
    with TensorStream(info, queue) as stream:
        for start in range(0, 500, unit):
            stop = min(start + unit, 500)
            rows = stream.rows(start, stop)
            assert (rows.shape, str(rows.dtype)) == ((stop - start, 33), "torch.float32")
            assert rows.data_ptr() % 4 == 0
            first, last = offset + start * 132, offset + stop * 132
            assert rows.numpy().tobytes() == CONTENT[first:last]


@pytest.mark.parametrize("unit", [100, 500])
def test_what_is_kept_is_there_once_more(
    unit: int, file: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read once, also rows in several blocks; all memory comes back, however far it was used."""
    lent, returned = list[int](), list[int]()
    lend, take_back = DiskQueue.lend, DiskQueue.take_back

    def lending(self: DiskQueue, size_bytes: int) -> memoryview:
        memory = lend(self, size_bytes)
        lent.append(len(memory))
        return memory

    def taking_back(self: DiskQueue, memory: memoryview) -> None:
        returned.append(len(memory))
        take_back(self, memory)

    monkeypatch.setattr(DiskQueue, "lend", lending)
    monkeypatch.setattr(DiskQueue, "take_back", taking_back)
    for stop in (500, 200, 0):
        with TensorStream(tensor(file, 3, 500, 132), queue) as stream:
            stream.keep()
            first = [bytes(stream.row_data(at, at + unit)) for at in range(0, 500, unit)]
            read = len(lent)
            stream.rewind()
            again = [bytes(stream.row_data(at, at + unit)) for at in range(0, stop, unit)]
        assert b"".join(first) == CONTENT[3 : 3 + 500 * 132]
        assert again == first[: len(again)] and len(lent) == read
        assert sorted(lent) == sorted(returned)


@pytest.mark.parametrize(("row", "step"), [(1, 8192), (10, 7680), (64, 8192), (65, 8192)])
def test_blocks_hold_multiples_of_128_rows(
    row: int, step: int, file: Path, queue: DiskQueue
) -> None:
    """Which converters take at once; as far as so many fit."""
    with TensorStream(tensor(file, 3, 1024, row), queue) as stream:
        sizes = [len(block) for block in stream.blocks()]
    whole, rest = divmod(1024 * row, step)
    assert sizes == [step] * whole + [rest] * (rest > 0)


@pytest.mark.parametrize("way", ["direct", "cached"])
@pytest.mark.parametrize("kept_bytes", [0, 20_000, SIZE - 5])
def test_a_shard_that_shrank_is_an_error(
    way: str, kept_bytes: int, file: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(way, monkeypatch)
    info = tensor(file, 10, SIZE - 10)
    real = OpenLocalFile.read_into

    def read_into(opened: Any, buffer: memoryview, start: int, end: int) -> slice:
        os.truncate(file, kept_bytes)
        return real(opened, buffer, start, end)

    monkeypatch.setattr(OpenLocalFile, "read_into", read_into)
    monkeypatch.setattr(OpenLocalFile, "read_cached", lambda *_: None)
    read = 0
    with (
        pytest.raises(IoError, match="ends early: .* at tensor x"),
        TensorStream(info, queue) as stream,
    ):
        for block in stream.blocks():
            assert bytes(block) == CONTENT[10 + read :][: len(block)]
            read += len(block)
    assert read == max(0, kept_bytes - 10) // BLOCK * BLOCK


def test_a_read_that_fails_is_raised_once_with_the_tensor_s_name(
    file: Path, queue: DiskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its block is wanted, and not before; the stream ends all the same."""
    real = OpenLocalFile.read_into

    def read_into(opened: Any, buffer: memoryview, start: int, end: int) -> slice:
        if start >= 3 * BLOCK:
            raise IoError("A file cannot be read", where=file, expected=1, found=2, todo="Mend it")
        return real(opened, buffer, start, end)

    monkeypatch.setattr(OpenLocalFile, "read_into", read_into)
    monkeypatch.setattr(OpenLocalFile, "read_cached", lambda *_: None)
    seen: list[bytes] = []
    with pytest.raises(IoError) as failure, TensorStream(tensor(file, 0, SIZE), queue) as stream:
        seen.extend(map(bytes, stream.blocks()))
    assert b"".join(seen) == CONTENT[: 3 * BLOCK]
    error = failure.value
    assert (error.what, error.where) == ("A file cannot be read, at tensor x", file)
    assert (error.expected, error.found, error.todo) == (1, 2, "Mend it")
    with TensorStream(tensor(file, 0, BLOCK), queue) as stream:
        assert [bytes(block) for block in stream.blocks()] == [CONTENT[:BLOCK]]


def test_only_bytes_under_way_are_waited_for_at_an_early_end(file: Path, queue: DiskQueue) -> None:
    with TensorStream(tensor(file, 5, SIZE - 5), queue) as stream:
        blocks = stream.blocks()
        assert bytes(next(blocks)) == CONTENT[5 : 5 + BLOCK]
    with TensorStream(tensor(file, 0, SIZE), queue) as stream:
        assert b"".join(bytes(block) for block in stream.blocks()) == CONTENT
