"""Files on disk one call at a time: which leftovers go, what is refused, what reaches the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.direct_io import copy_bytes, equal_bytes, open_directly, page_memory
from mtp_checkpoints.sources.files import (
    EXCLUSIVE_FILE,
    NEW_FILE,
    make_folder,
    name_when_whole,
    remove_temporaries,
    sync_folder,
    temporary_path,
    write_bytes,
    write_whole,
)


def fails(*arguments: object, **options: object) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def refusal(action: Callable[[], object]) -> tuple[object, object]:
    with pytest.raises(IoError) as caught:
        action()
    assert caught.value.what == "A file cannot be written"
    return caught.value.where, caught.value.found


def test_leftovers_of_one_file_are_removed(tmp_path: Path) -> None:
    """Every attempt's; not those of other files, nor what others named alike."""
    path = tmp_path / "a.json"
    left = [temporary_path(path) for _ in range(3)]
    others = [path, temporary_path(tmp_path / "b.json"), temporary_path(tmp_path / "xa.json")]
    others += [tmp_path / f".0123456789aB.{path.name}.tmp", tmp_path / f"{path.name}.tmp"]
    for one in (*left, *others):
        one.touch()
    (tmp_path / "inner").mkdir()
    inner = temporary_path(tmp_path / "inner/a.json")
    inner.touch()
    remove_temporaries(path)
    assert {one for one in tmp_path.iterdir() if one.is_file()} == set(others)
    assert inner.exists()
    remove_temporaries(path)


def test_leftovers_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "a.json", os.unlink
    temporary_path(path).touch()

    def another_run_is_faster(one: Any, *arguments: Any, **options: Any) -> None:
        real(one)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", another_run_is_faster)
        remove_temporaries(path)
    temporary_path(path).touch()
    monkeypatch.setattr(os, "unlink", fails)
    assert refusal(lambda: remove_temporaries(path)) == (path, "Input/output error")
    gone = tmp_path / "none/a.json"
    assert refusal(lambda: remove_temporaries(gone)) == (gone, "No such file or directory")


def test_a_name_may_have_any_character() -> None:
    assert name_when_whole(".0123456789ab.a\nb.json.tmp") == "a\nb.json"
    assert name_when_whole("x.0123456789ab.a.tmp") is None
    assert name_when_whole(".0123456789ab..tmp") is None


def test_a_new_file_is_empty_and_no_link(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "other"
    other.write_bytes(b"of somebody else")
    for content in (b"first", b"2nd"):
        fd = os.open(path, NEW_FILE, 0o666)
        assert os.fstat(fd).st_size == 0
        os.write(fd, content)
        assert os.pread(fd, 10, 0) == content
        os.close(fd)
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        os.open(path, NEW_FILE, 0o666)
    assert other.read_bytes() == b"of somebody else"


def test_a_file_of_one_s_own_is_made_by_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    fd = os.open(path, EXCLUSIVE_FILE, 0o666)
    os.write(fd, b"mine")
    os.close(fd)
    with pytest.raises(FileExistsError):
        os.open(path, EXCLUSIVE_FILE, 0o666)
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(FileExistsError):
        os.open(tmp_path / "link", EXCLUSIVE_FILE, 0o666)
    assert path.read_bytes() == b"mine"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths of what is brought to disk."""
    found: list[Path] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_reaches_the_disk_before_it_has_its_name(
    tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, opened = tmp_path / "a", os.replace, descriptors()

    def replace(old: Path, new: Path) -> None:
        assert [name_when_whole(one.name) for one in synced] == ["a"]
        assert old.read_bytes() == b"content"
        real(old, new)

    monkeypatch.setattr(os, "replace", replace)
    write_bytes(path, b"content")
    assert synced[1:] == [tmp_path]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert descriptors() == opened


def test_a_disk_may_take_few_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: real(fd, data[:3], place))
    write_bytes(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), OSError(28, "full")])
def test_what_is_not_whole_is_no_file(error: BaseException, tmp_path: Path) -> None:
    opened, path = descriptors(), tmp_path / "a"

    def write(fd: int) -> None:
        os.write(fd, b"half of it")
        raise error

    with pytest.raises(IoError if isinstance(error, OSError) else type(error)) as caught:
        write_whole(path, write)
    if isinstance(error, OSError):
        assert isinstance(caught.value, IoError) and caught.value.__cause__ is error
        assert (caught.value.where, caught.value.found) == (path, "full")
    assert not list(tmp_path.iterdir())
    assert descriptors() == opened


def test_folders_survive_a_power_cut(tmp_path: Path, synced: list[Path]) -> None:
    """The entries of all that were made, and of no others."""
    opened = descriptors()
    make_folder(tmp_path / "a/b/c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a/b"}
    assert (tmp_path / "a/b/c").is_dir()
    synced.clear()
    make_folder(tmp_path / "a/b/c")
    assert not synced
    make_folder(tmp_path / "a/d")
    assert synced == [tmp_path / "a"]
    assert descriptors() == opened


def test_a_folder_by_a_path_from_here(
    tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(Path("a/b"))
    assert set(synced) == {tmp_path, tmp_path / "a"}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = tmp_path / "file/inside"
    assert refusal(lambda: make_folder(inside)) == (inside, "Not a directory")
    assert refusal(lambda: make_folder(tmp_path / "file")) == (tmp_path / "file", "File exists")
    with pytest.raises(NotADirectoryError):
        sync_folder(tmp_path / "file")


def test_memory_of_pages() -> None:
    one, other = page_memory(5000), page_memory(5000)
    assert len(one) == 5000 and bytes(one) == bytes(5000)
    copy_bytes(one[4000:4003], memoryview(b"abc"))
    assert bytes(one[3999:4004]) == b"\0abc\0"
    assert not equal_bytes(one, other)
    copy_bytes(other, one)
    assert equal_bytes(one, other) is True
    assert not equal_bytes(one, other[:4999])


def test_a_file_is_opened_past_the_page_cache_or_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[int] = []

    def refused(path: Path, asked: int) -> int:
        flags.append(asked)
        raise OSError(errno.EINVAL, "Invalid argument")

    with pytest.raises(FileNotFoundError):
        open_directly(tmp_path / "none", os.O_RDONLY)
    monkeypatch.setattr(os, "open", refused)
    assert open_directly(tmp_path, os.O_WRONLY) is None
    assert flags == [os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC]
