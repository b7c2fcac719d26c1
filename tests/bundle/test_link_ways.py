"""Ways to link a shard, one call at a time: what is tried, guessed, undone and reported."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cases import Outcome, run_in_a_fork
from mtp_checkpoints.errors import IoError, UnsupportedError
from mtp_checkpoints.sources.files import name_when_whole
from mtp_export.bundle import links
from mtp_export.bundle.links import existing_parent, guess_links, link_shard, resolve_links
from mtp_export.plan import Link


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "shard"
    path.parent.mkdir()
    path.write_bytes(b"content")
    return path


def fail(number: int) -> Any:
    def call(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def clone(target: int, request: int, source: int) -> None:
    """The call of a file system with shared extents, imitated."""
    assert request == 0x40049409
    os.sendfile(target, source, 0, os.fstat(source).st_size)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ways that are tried, from now on; cloning works."""
    ways: list[str] = []
    real = os.link

    def cloning(*arguments: Any) -> None:
        ways.append("reflink")
        clone(*arguments)

    def linking(*arguments: Any) -> None:
        ways.append("hardlink")
        real(*arguments)

    monkeypatch.setattr(links.fcntl, "ioctl", cloning)
    monkeypatch.setattr(os, "link", linking)
    return ways


def test_the_nearest_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert existing_parent(tmp_path) == tmp_path
    assert existing_parent(tmp_path / "a/b/c") == tmp_path
    assert existing_parent(tmp_path / "file") == tmp_path
    monkeypatch.chdir(tmp_path)
    assert existing_parent(Path("a/b")) == tmp_path


@pytest.mark.parametrize("wanted", Link)
def test_each_way_is_tried_once_and_undone(
    wanted: Link, shard: Path, tmp_path: Path, tried: list[str]
) -> None:
    other = shard.with_name("other")
    other.write_bytes(b"more")
    found = resolve_links(wanted, iter([shard, other]), tmp_path / "out/main")
    way = Link.REFLINK if wanted is Link.AUTO else wanted
    assert found == {shard: way, other: way}
    assert tried == ([] if wanted is Link.COPY else [way.value])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert (shard.stat().st_nlink, shard.read_bytes()) == (1, b"content")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("output", ["out", "in/there"])
def test_what_a_killed_try_left_is_removed(output: str, shard: Path, tmp_path: Path) -> None:
    shard.with_name("there").mkdir()
    folder = tmp_path / output

    def resolve() -> Outcome:
        assert resolve_links(Link.HARDLINK, [shard], folder) == {shard: Link.HARDLINK}
        return Outcome(0, "", "")

    left = 0
    for call_number in itertools.count(1):
        if run_in_a_fork(resolve, call_number) == 0:
            break
        left += len(list(tmp_path.glob("**/.*")))
    assert left > 2
    assert not list(tmp_path.glob("**/.*"))


@pytest.mark.parametrize(("age_seconds", "stays"), [(0, True), (58, True), (62, False)])
def test_a_try_of_another_machine_is_left_alone_while_it_is_young(
    age_seconds: int, stays: bool, shard: Path, tmp_path: Path
) -> None:
    other = tmp_path / f".mtp-export-probe-{'0' * 16}-7-8-abc"
    other.mkdir()
    (other / "hardlink").touch()
    then = time.time() - age_seconds
    os.utime(other, (then, then))
    resolve_links(Link.HARDLINK, [shard], tmp_path / "out")
    assert other.exists() is stays


def test_a_try_of_another_share_is_left_alone(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares begin at the same time, in one folder: none takes another's try away."""
    real, folder, nested = os.link, tmp_path / "out", list[Any]()

    def linking(source: Any, target: Any) -> None:
        if not nested:
            nested.append(None)
            nested[0] = resolve_links(Link.HARDLINK, [shard], folder)
        real(source, target)

    monkeypatch.setattr(os, "link", linking)
    found = resolve_links(Link.HARDLINK, [shard], folder)
    assert found == nested[0] == {shard: Link.HARDLINK}
    assert not list(tmp_path.glob("**/.*"))


def test_auto_takes_what_works(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.fcntl, "ioctl", fail(errno.EOPNOTSUPP))
    assert resolve_links(Link.AUTO, [shard], tmp_path) == {shard: Link.HARDLINK}
    monkeypatch.setattr(os, "link", fail(errno.EXDEV))
    assert resolve_links(Link.AUTO, [shard], tmp_path) == {shard: Link.COPY}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("owners", [(0, 0), (0, 5)])
@pytest.mark.parametrize("devices", [(1, 1), (1, 2)])
def test_every_device_and_owner_is_tried(
    devices: tuple[int, int],
    owners: tuple[int, int],
    shard: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = [shard, shard.with_name("b"), shard.with_name("c")]
    for other in shards[1:]:
        other.write_bytes(b"more")
    first, second = zip(devices, owners, strict=True)
    kinds = dict(zip(shards, (first, second, first), strict=True))
    real, tries = Path.stat, list[Path]()

    def stat(path: Path, **options: Any) -> Any:
        if path in kinds:
            device, owner = kinds[path]
            return SimpleNamespace(st_dev=device, st_uid=owner)
        return real(path, **options)

    def linking(source: str, target: Path) -> None:
        tries.append(Path(source))
        if source.endswith("b"):
            raise OSError(errno.EPERM, "not allowed")

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(links.fcntl, "ioctl", fail(errno.ENOTTY))
    monkeypatch.setattr(os, "link", linking)
    found = resolve_links(Link.AUTO, shards, tmp_path)
    other = devices[0] != devices[1] or owners[0] != owners[1]
    assert tries == (shards[:2] if other else shards[:1])
    assert found[shards[1]] is (Link.COPY if other else Link.HARDLINK)
    assert found[shards[0]] is found[shards[2]] is Link.HARDLINK


@pytest.mark.parametrize("way", [Link.REFLINK, Link.HARDLINK])
def test_a_way_that_does_not_work_is_refused(
    way: Link, shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.fcntl, "ioctl", fail(errno.ENOTTY))
    monkeypatch.setattr(os, "link", fail(errno.ENOTTY))
    with pytest.raises(UnsupportedError) as refusal:
        resolve_links(way, [shard], tmp_path / "out")
    error = refusal.value
    assert error.what == f"The file system cannot {way} from the input to the output"
    assert error.where == f"{shard} to {tmp_path / 'out'}"
    assert error.found == f"{way}: {os.strerror(errno.ENOTTY)}"
    assert "--link auto" in str(error.todo)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_folder_that_cannot_be_written(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", fail(errno.EROFS))
    with pytest.raises(IoError, match="Read-only file system") as refusal:
        resolve_links(Link.AUTO, [shard], tmp_path / "out")
    assert refusal.value.where == tmp_path


@pytest.mark.parametrize(
    ("wanted", "device", "user", "writable", "guessed"),
    [
        (Link.AUTO, 1, 0, False, Link.HARDLINK),
        (Link.AUTO, 1, 7, False, Link.HARDLINK),
        (Link.AUTO, 1, 8, True, Link.HARDLINK),
        (Link.AUTO, 1, 8, False, Link.COPY),
        (Link.AUTO, 2, 0, True, Link.COPY),
        (Link.COPY, 1, 0, True, Link.COPY),
        (Link.HARDLINK, 2, 8, False, Link.HARDLINK),
        (Link.REFLINK, 2, 8, False, Link.REFLINK),
    ],
)
def test_a_guess_by_device_and_owner(
    wanted: Link,
    device: int,
    user: int,
    writable: bool,
    guessed: Link,
    shard: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = Path.stat, list[int]()

    def stat(path: Path, **options: Any) -> Any:
        if path == shard:
            return SimpleNamespace(st_dev=device, st_uid=7)
        found = real(path, **options)
        return SimpleNamespace(st_dev=1, st_uid=0, st_mode=found.st_mode)

    def access(path: Path, mode: int) -> bool:
        asked.append(mode)
        return writable

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "access", access)
    assert guess_links(wanted, [shard], tmp_path / "out/main") == {shard: guessed}
    assert set(asked) <= {os.W_OK}


@pytest.mark.parametrize("way", [Link.REFLINK, Link.HARDLINK, Link.COPY])
def test_a_link_replaces_what_is_there(way: Link, shard: Path, tried: list[str]) -> None:
    folder = shard.with_name("out")
    folder.mkdir()
    (folder / "new").write_bytes(b"old")
    link_shard(way, shard, folder / "new")
    assert (folder / "new").read_bytes() == b"content"
    assert (folder / "new").samefile(shard) is (way is Link.HARDLINK)
    link_shard(way, shard, folder / "new")
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_a_hard_link_is_to_the_file_behind_a_symlink(shard: Path) -> None:
    symlink = shard.with_name("symlink")
    symlink.symlink_to(shard)
    link_shard(Link.HARDLINK, symlink, shard.with_name("new"))
    assert not shard.with_name("new").is_symlink()
    assert shard.with_name("new").samefile(shard)


def test_clones_and_renames_are_brought_to_disk(
    shard: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    link_shard(Link.REFLINK, shard, shard.with_name("new"))
    assert [name_when_whole(synced[0]), *synced[1:]] == ["new", "in"]
    synced.clear()
    link_shard(Link.HARDLINK, shard, shard.with_name("other"))
    assert synced == ["in"]


def test_a_link_that_fails_names_its_target(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fail(errno.EMLINK))
    with pytest.raises(IoError, match="Too many links") as refusal:
        link_shard(Link.HARDLINK, shard, shard.with_name("new"))
    assert refusal.value.where == shard.with_name("new")
