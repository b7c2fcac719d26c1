"""Rows of tensors read on demand: past the page cache or through it, the bytes are the file's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases import export, tree
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType, torch_dtype
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources import local_folder
from mtp_checkpoints.sources.direct_io import SLACK_BYTES
from mtp_checkpoints.sources.disk_queue import SMALL_BYTES
from mtp_checkpoints.sources.local_folder import LocalFolder, OpenLocalFile
from mtp_checkpoints.tensors.tensor_reader import TensorReader, as_array, as_rows, row_bytes

SIZE = 300_001
CONTENT = os.urandom(SIZE)
WAYS = ("direct", "refused at open", "refused at read", "cached")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def prepare(way: str, patch: pytest.MonkeyPatch) -> list[int]:
    """Have every tensor read in a way; the flags of the opens are noted."""
    patch.setattr(local_folder, "MIN_DIRECT_BYTES", 1)
    patch.setattr(OpenLocalFile, "_is_cached", lambda file, once: way == "cached")
    if way != "cached":
        patch.setattr(OpenLocalFile, "read_cached", lambda *_: None)
    real_open, real_read, opened = os.open, os.preadv, []

    def open_(path: Any, flags: int, *more: Any, **options: Any) -> int:
        opened.append(flags)
        if way == "refused at open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *more, **options)

    def read(file: int, *more: Any) -> int:
        if way == "refused at read" and opened and opened.pop():
            raise OSError(errno.EINVAL, "Invalid argument")
        try:
            return real_read(file, *more)
        except OSError as error:
            raise AssertionError("a direct read of other than whole pages") from error

    patch.setattr(os, "open", open_)
    patch.setattr(os, "preadv", read)
    return opened


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 1, 4096, 5003, SIZE - 4097])
@pytest.mark.parametrize("size", [1, 4096, 4097, 200_000])
def test_every_byte(
    way: str, offset: int, size: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = min(size, SIZE - offset)
    info = TensorInfo(
        "x", DType.U8, (size,), LocalFolder(file.parent).file(file.name), offset, size
    )
    opened = prepare(way, monkeypatch)
    with TensorReader(info, once=True) as reader:
        found = reader.rows(0, size).numpy().tobytes()
    assert found == CONTENT[offset : offset + size]
    if way == "direct":
        assert opened == [os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 2, 4096, 5003])
def test_rows_of_any_dtype_at_any_offset(
    way: str, offset: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(way, monkeypatch)
    info = TensorInfo(
        "x", DType.F32, (100, 33), LocalFolder(file.parent).file(file.name), offset, 100 * 33 * 4
    )
    with TensorReader(info, once=True) as reader:
        for start, stop in ((0, 100), (3, 4), (57, 99), (5, 5)):
            rows = reader.rows(start, stop)
            assert (rows.shape, str(rows.dtype)) == ((stop - start, 33), "torch.float32")
            assert rows.data_ptr() % 4 == 0
            first, last = offset + start * 132, offset + stop * 132
            assert rows.numpy().tobytes() == CONTENT[first:last]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offset", [0, 2, 5003])
def test_windows_of_a_matrix(
    way: str, offset: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some columns of some rows are read, and nothing beside them."""
    prepare(way, monkeypatch)
    info = TensorInfo(
        "x", DType.F32, (100, 33), LocalFolder(file.parent).file(file.name), offset, 100 * 33 * 4
    )
    matrix = np.frombuffer(CONTENT, np.uint8, 100 * 33 * 4, offset).reshape(100, 33 * 4)
    with TensorReader(info, once=True) as reader:
        for rows in (range(100), range(3, 4), range(57, 99), range(5, 5)):
            for columns in (range(33), range(1), range(7, 20), range(32, 33), range(5, 5)):
                found = reader.window(rows, columns)
                assert tuple(found.shape) == (len(rows), len(columns))
                assert str(found.dtype) == "torch.float32"
                wanted = matrix[rows.start : rows.stop, 4 * columns.start : 4 * columns.stop]
                assert found.numpy().tobytes() == wanted.tobytes()


def test_a_window_s_end_is_the_tensor_s(file: Path) -> None:
    """The last tensor of a file ends with it: a window of its last columns needs no byte more."""
    os.truncate(file, 4 * 100)
    info = TensorInfo("x", DType.F32, (10, 10), LocalFolder(file.parent).file(file.name), 0, 400)
    with TensorReader(info) as reader:
        assert reader.window(range(9, 10), range(8, 10)).numpy().tobytes() == CONTENT[392:400]


def test_a_window_of_a_matrix_without_columns(file: Path) -> None:
    source = LocalFolder(file.parent).file(file.name)
    with TensorReader(TensorInfo("x", DType.F32, (10, 0), source, 0, 0)) as reader:
        assert reader.window(range(3), range(0)).shape == (3, 0)


def test_the_size_of_a_row(file: Path) -> None:
    source = LocalFolder(file.parent).file(file.name)
    for shape, size, row in (((4, 5), 40, 10), ((7,), 14, 2), ((), 2, 2), ((0, 5), 0, 0)):
        assert row_bytes(TensorInfo("x", DType.BF16, shape, source, 0, size)) == row


@pytest.mark.parametrize(
    ("dtype", "array", "item_bytes"),
    [("F32", np.float32, 4), ("BF16", np.uint16, 2), ("F8_E4M3", np.uint8, 1)],
)
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_are_in_place_where_they_are_aligned(
    dtype: str, array: Any, item_bytes: int, shift: int, file: Path
) -> None:
    """As a tensor and as an array; elsewhere they are copied, and the same."""
    source, size = LocalFolder(file.parent).file(file.name), 6 * 5 * item_bytes
    info = TensorInfo("x", DType[dtype], (9, 5), source, 0, 9 * 5 * item_bytes)
    memory = np.frombuffer(bytearray(CONTENT[: size + 1]), np.uint8)
    data = memoryview(memory)[shift : shift + size]
    found, rows = as_array(info, data, 6), as_rows(info, data, 6)
    assert (found.shape, found.dtype) == ((6, 5), array)
    assert (tuple(rows.shape), rows.dtype) == ((6, 5), torch_dtype(DType[dtype]))
    wanted = CONTENT[shift : shift + size]
    assert found.tobytes() == rows.view(torch_dtype(DType.U8)).numpy().tobytes() == wanted
    in_place = shift % item_bytes == 0
    memory[shift] ^= 0xFF
    assert (found.tobytes() != wanted) is in_place
    assert (rows.view(torch_dtype(DType.U8)).numpy().tobytes() != wanted) is in_place
    assert found.flags.aligned and rows.data_ptr() % item_bytes == 0


def test_small_reads_take_no_memory_of_pages(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one call, of the bytes that are wanted."""
    info = TensorInfo("x", DType.U8, (SIZE,), LocalFolder(file.parent).file(file.name), 0, SIZE)
    large: list[tuple[int, int]] = []
    real = OpenLocalFile.read_into

    def read_into(opened: Any, buffer: memoryview, start: int, end: int) -> slice:
        large.append((start, end))
        assert len(buffer) >= end - start + SLACK_BYTES
        return real(opened, buffer, start, end)

    monkeypatch.setattr(OpenLocalFile, "read_into", read_into)
    with TensorReader(info) as reader:
        for start, size in ((5, SMALL_BYTES - 1), (7, SMALL_BYTES)):
            rows = reader.rows(start, start + size)
            assert rows.numpy().tobytes() == CONTENT[start : start + size]
    assert large == [(7, 7 + SMALL_BYTES)]


@pytest.mark.parametrize("way", ["direct", "cached"])
def test_a_shard_that_shrank_is_an_error(
    way: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(way, monkeypatch)
    info = TensorInfo(
        "x", DType.U8, (SIZE - 10,), LocalFolder(file.parent).file(file.name), 10, SIZE - 10
    )
    with TensorReader(info, once=True) as reader, pytest.raises(IoError, match="ends early"):
        os.truncate(file, SIZE - 5)
        reader.rows(0, SIZE - 10)


def test_what_is_not_read_once_goes_through_the_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = prepare("direct", monkeypatch)
    with TensorReader(
        TensorInfo("x", DType.U8, (SIZE,), LocalFolder(file.parent).file(file.name), 0, SIZE)
    ):
        assert not opened


@pytest.mark.parametrize(("answer", "is_cached"), [(errno.EAGAIN, False), (errno.EOPNOTSUPP, True)])
def test_the_cache_is_asked_first(
    answer: int, is_cached: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_folder, "MIN_DIRECT_BYTES", 1)
    info = TensorInfo("x", DType.U8, (SIZE,), LocalFolder(file.parent).file(file.name), 0, SIZE)

    def reading(file: int, buffers: object, place: int, *flags: int) -> int:
        assert flags == (os.RWF_NOWAIT,)
        raise OSError(answer, "")

    monkeypatch.setattr(os, "preadv", reading)
    opened = info.file.open(range(SIZE))
    assert isinstance(opened, OpenLocalFile)
    assert opened._is_direct is not is_cached
    opened.close()


@pytest.mark.parametrize("found", ["all", "some", errno.EAGAIN, errno.EOPNOTSUPP, errno.EIO])
def test_what_the_page_cache_has_is_read_without_waiting(
    found: str | int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it or nothing; what is wrong is for a read that waits to say."""
    real = os.preadv

    def reading(descriptor: int, buffers: Any, place: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if isinstance(found, int):
            raise OSError(found, "")
        return real(descriptor, buffers if found == "all" else [buffers[0][:9]], place)

    monkeypatch.setattr(os, "preadv", reading)
    opened, buffer = LocalFolder(file.parent).file(file.name).open(), memoryview(bytearray(200))
    place = opened.read_cached(buffer, 7, 107)
    opened.close()
    assert place == (slice(0, 100) if found == "all" else None)
    assert place is None or bytes(buffer[place]) == CONTENT[7:107]


@pytest.mark.parametrize("target", ["hf", "xllm", "paddlenlp"])
def test_an_export_is_the_same_however_it_reads(
    target: str,
    pristine: Path,
    output: Path,
    exported: Callable[[str], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = exported(target)
    prepare("direct", monkeypatch)
    outcome = export(pristine, output, "--target", target, "--link", "copy")
    assert outcome.code == 0, outcome.err
    assert tree(output) == expected
