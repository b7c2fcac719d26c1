"""Local files one call at a time: what is read, and the words and places of every refusal."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.errors import InvalidInputError, IoError, MtpExportError
from mtp_checkpoints.sources import local_folder
from mtp_checkpoints.sources.direct_io import SLACK_BYTES, page_memory
from mtp_checkpoints.sources.files import (
    check_small_file,
    name_when_whole,
    read_failure,
    temporary_path,
    write_bytes,
    write_failure,
    write_json,
)
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.sources.strict_json import DuplicateKeyError, parse

DISTRUST = "Do not trust this checkpoint; get it again from its source"


def fields(error: MtpExportError) -> tuple[object, ...]:
    return error.what, error.where, error.expected, error.found, error.todo


def refused(action: Callable[[], object]) -> tuple[object, ...]:
    with pytest.raises((InvalidInputError, IoError)) as refusal:
        action()
    return fields(refusal.value)


def test_what_a_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/b").touch()
    folder = LocalFolder(tmp_path)
    assert folder.names() == {"a"}
    assert folder.names("inner") == {"b"}
    assert folder.names("none") == folder.names("a") == frozenset()
    assert folder.read("a") == b"content"
    file = folder.file("inner/b")
    assert file.path == tmp_path / "inner/b"
    what, where, _, _, todo = refused(lambda: folder.read("none"))
    assert (what, where) == ("A file that every checkpoint has is missing", tmp_path / "none")
    assert str(todo).startswith("Point at the folder")


@pytest.mark.parametrize(
    ("commits", "point_at"),
    [
        (["0123"], "1 snapshots: point at {folder}/snapshots/0123"),
        (["0123", "4567"], "2 snapshots: point at {folder}/snapshots/<commit>"),
        ([], "0 snapshots: point at {folder}/snapshots/<commit>"),
    ],
)
def test_a_repository_of_the_hub_s_cache(commits: list[str], point_at: str, tmp_path: Path) -> None:
    """Its files are one level deeper."""
    for name in ("models--acme--tiny", "acme--tiny"):
        folder = tmp_path / name
        (folder / "snapshots").mkdir(parents=True)
        for commit in commits:
            (folder / "snapshots" / commit).mkdir()
        todo = str(refused(lambda folder=folder: LocalFolder(folder).read("config.json"))[4])  # type: ignore[misc]
        is_cache = name.startswith("models--")
        assert todo.endswith(point_at.format(folder=folder)) is is_cache
        assert todo.startswith("This is a repository in the Hub's download cache") is is_cache
    other = tmp_path / "models--acme--other"
    other.mkdir()
    assert str(refused(lambda: LocalFolder(other).read("a"))[4]).startswith("Point at the folder")


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    what, where, _, found, _ = refused(lambda: LocalFolder(tmp_path).names("inner"))
    assert (what, where, found) == (
        "A file cannot be read",
        tmp_path / "inner",
        "Permission denied",
    )


def test_where_links_may_lead(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "homes"
    for folder in (home / "kept", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
    (home / "plain").write_bytes(b"y")
    (home / "link").symlink_to("kept/file")
    (home / "lost").symlink_to("kept/none")
    (home / "out").symlink_to(elsewhere / "file")
    folder = LocalFolder(home)
    assert folder.resolved("plain") == home / "plain"
    assert folder.resolved("link") == folder.resolved("kept/file") == home / "kept/file"
    assert refused(lambda: folder.resolved("lost")) == (
        "A link leads to no file",
        home / "lost",
        fields(InvalidInputError(""))[2],
        f"a link to {home / 'kept/none'}",
        "Download the file again",
    )
    assert refused(lambda: folder.resolved("out")) == (
        "A file leads out of the checkpoint",
        home / "out",
        "a file in the folder, or one of the Hub's cache",
        f"a link to {elsewhere / 'file'}",
        f"{DISTRUST}; or, if the link is yours, put the file itself there",
    )


@pytest.mark.parametrize(
    ("snapshot", "blobs", "allowed"),
    [
        ("models--a/snapshots/1", "models--a/blobs", True),
        ("models--a/snapshots/1/sub", "models--a/blobs", True),
        ("models--a/snapshots/1", "blobs", True),
        ("models--a/snapshots/1", "models--b/blobs", False),
        ("models--a/snapshot/1", "models--a/blobs", False),
        ("model-a/snapshots/1", "model-a/blobs", False),
        ("models--a/snapshots/1", "models--a/refs", False),
    ],
)
def test_blobs_of_the_hub_s_cache(snapshot: str, blobs: str, allowed: bool, tmp_path: Path) -> None:
    home, other = tmp_path / snapshot, tmp_path / blobs
    home.mkdir(parents=True)
    other.mkdir(parents=True, exist_ok=True)
    (other / "blob").write_bytes(b"x")
    (home / "link").symlink_to(other / "blob")
    folder = LocalFolder(home)
    if allowed:
        assert folder.resolved("link") == other / "blob"
    else:
        assert refused(lambda: folder.resolved("link"))[0] == "A file leads out of the checkpoint"


def make_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/{path.name}")  # the path itself may be too long
    os.close(here)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Path.mkdir, "a folder"),
        (os.mkfifo, "a named pipe"),
        (make_socket, "a socket"),
        (lambda path: os.mknod(path, 0o20600, os.makedev(1, 5)), "a device"),
    ],
)
def test_what_is_no_regular_file(make: Callable[[Path], object], kind: str, tmp_path: Path) -> None:
    try:
        make(tmp_path / "x")
    except PermissionError:
        pytest.skip("devices are made by root")
    assert refused(lambda: LocalFolder(tmp_path).file("x").open()) == (
        "A file of the checkpoint is no regular file",
        tmp_path / "x",
        "a regular file, or a link to one",
        kind,
        DISTRUST,
    )


def test_bytes_of_an_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "x", os.urandom(10_000)
    path.write_bytes(content)
    file = LocalFolder(tmp_path).file("x").open()
    assert file.size_bytes == 10_000
    assert file.read(0, 10) == content[:10] and file.read(5_000, 10_000) == content[5_000:]
    buffer = page_memory(8192 + SLACK_BYTES)
    assert bytes(buffer[file.read_into(buffer, 3, 8_000)]) == content[3:8_000]
    for read in (
        lambda: file.read(9_990, 10_020),
        lambda: file.read_into(buffer, 9_990, 10_020),
    ):
        assert refused(read) == (
            "A file ends early: it shrank while it was read",
            path,
            "at least 10020 bytes",
            "10000 bytes",
            "Check that nothing else writes it, then run the same command again",
        )

    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    monkeypatch.setattr(os, "preadv", fails)
    for read in (lambda: file.read(0, 1), lambda: file.read_into(buffer, 0, 1)):
        assert refused(read)[:2] == ("A file cannot be read", path)
    file.close()
    path.unlink()
    assert refused(lambda: LocalFolder(tmp_path).file("x").open())[1] == path


@pytest.mark.parametrize("asked", ["once", "again"])
@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20])
def test_large_reads_that_pass_by_bypass_the_cache(
    size: int, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = tmp_path / "x", list[int]()
    path.write_bytes(bytes(1 << 20))

    def directly(path: Path, flags: int) -> None:
        opened.append(flags)

    monkeypatch.setattr(local_folder, "open_directly", directly)
    monkeypatch.setattr(local_folder.OpenLocalFile, "_is_cached", lambda *_: False)
    once = range(size) if asked == "once" else None
    file = LocalFolder(tmp_path).file("x").open(once)
    assert opened == ([os.O_RDONLY] if asked == "once" and size == 1 << 20 else [])
    assert file.read(0, 2) == bytes(2)
    file.close()


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("config.json", 16_000_000),
        ("model.safetensors.index.json", 64_000_000),
        ("mtp_export.json", 128_000_000),
        ("tokenizer.json", 48_000_000),
        ("x", 48_000_000),
    ],
    ids=["config", "index", "manifest", "tokenizer", "other"],
)
def test_sizes_of_small_files(name: str, limit: int) -> None:
    check_small_file(Path("a") / name, limit)
    assert refused(lambda: check_small_file(Path("a") / name, limit + 1)) == (
        "A file is too large for what it is",
        Path("a") / name,
        f"at most {limit} bytes",
        f"{limit + 1} bytes",
        "Get the file again from the checkpoint's source",
    )


def test_failures_of_the_disk_in_words() -> None:
    path, again = Path("x"), ", then run the same command again: it goes on where it stopped"
    nothing = fields(IoError(""))[2]
    assert fields(read_failure(path, OSError(5, "Input/output error"))) == (
        "A file cannot be read",
        path,
        nothing,
        "Input/output error",
        "Check its permissions and the disk",
    )
    assert read_failure(path, OSError("odd")).found == "odd"
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert fields(write_failure(path, OSError(number, "full"))) == (
            "The disk filled up while writing",
            path,
            nothing,
            "full",
            f"Free some space{again}",
        )
    assert fields(write_failure(path, OSError("odd"))) == (
        "A file cannot be written",
        path,
        nothing,
        "odd",
        f"Check the folder's permissions and the disk{again}",
    )


def test_small_files_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    first, second = temporary_path(path), temporary_path(path)
    assert first.parent == tmp_path and first != second
    assert re.fullmatch(r"\.[0-9a-f]{12}\.a\.json\.tmp", first.name) and first != second
    shorter = path.with_name(".0123456789a.a.json.tmp")
    assert [name_when_whole(one.name) for one in (shorter, path.with_name("x.tmp"))] == [None] * 2
    assert [name_when_whole(one.name) for one in (first, second, path)] == ["a.json"] * 2 + [None]
    assert fnmatch(first.name, ".*.a.json.tmp")
    write_json(path, {"b": [1], "a": "ü"})
    assert path.read_bytes() == b'{\n  "b": [\n    1\n  ],\n  "a": "\\u00fc"\n}\n'
    write_bytes(path, b"")
    assert path.read_bytes() == b""
    write_bytes(path, b"new")

    def fails(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fails)
    assert refused(lambda: write_bytes(path, b"newer"))[1] == path
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NaN", "^NaN is no JSON number"),
        ("[-Infinity]", "^-Infinity is no JSON number"),
        ("1e999", "^1e999 is no JSON number"),
        ("9" * 400 + ".0", f"^{'9' * 50} is no JSON number"),
        ('"\\ud800"', "^half of a surrogate pair in a string"),
        ("[" * 65 + "]" * 65, "^nested deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "^nested deeper than 64"),
        ("[" * 100_000, "^nested deeper than 64"),
    ],
)
def test_what_is_no_json(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text.encode())


def test_what_is_json() -> None:
    assert parse(b'{"a": [1, 2.5, null, "\\ud83d\\ude00", true]}') == {
        "a": [1, 2.5, None, "\U0001f600", True]
    }
    assert parse(b'"\\\\ud800"') == "\\ud800"
    deepest: Any = parse(b"[" * 64 + b"]" * 64)
    for _ in range(63):
        (deepest,) = deepest
    assert deepest == []
    assert parse(b'{"a":' * 64 + b"1" + b"}" * 64)
    with pytest.raises(DuplicateKeyError) as refusal:
        parse(b'{"a": {"b": 1, "b": 2}}')
    assert refusal.value.args == ("b",)
    assert str(refusal.value) == "the key 'b' twice"
    # Looking each key up among all of them would take minutes.
    pairs = b",".join(b'"%d":1' % key for key in range(200_000))
    with pytest.raises(DuplicateKeyError, match="'199999' twice"):
        parse(b'{%s,"199999":2}' % pairs)
    for lone in (b'"\\ud83d"', b'{"a": [["b", "\\ude00"]]}', b'[{"\\ud83d": 1}]'):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse(lone)
    with pytest.raises(ValueError, match="utf-8"):
        parse(b'"\xff"')
