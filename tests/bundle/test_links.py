"""Shards that stay whole are linked, or copied where that fails, or refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cases import export, hub_cache, read_json, read_tensors
from mtp_export.bundle import links
from mtp_export.plan import Link


def shards_of(output: Path) -> dict[str, dict[str, object]]:
    manifest: dict[str, dict[str, dict[str, dict[str, object]]]] = read_json(
        output / "mtp_export.json"
    )["parts"]["main"]
    return manifest["shards"]  # type: ignore[return-value]


def test_whole_shards_are_hard_links_to_the_source(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--link", "hardlink").code == 0
    shards = shards_of(output)
    linked = [name for name, facts in shards.items() if "link" in facts]
    assert len(linked) == len(shards) - 1, "one boundary shard is rewritten"
    for name in linked:
        assert (output / "main" / name).samefile(pristine / str(shards[name]["source_shard"]))


def test_copy_writes_every_shard(pristine: Path, output: Path) -> None:
    assert export(pristine, output, "--link", "copy").code == 0
    assert not [name for name, facts in shards_of(output).items() if "link" in facts]
    assert all(path.stat().st_nlink == 1 for path in (output / "main").iterdir())


def test_links_follow_a_download_cache_s_symlinks(
    source: Path, output: Path, tmp_path: Path
) -> None:
    snapshot = hub_cache(source, tmp_path / "cache")
    assert export(snapshot, output, "--link", "hardlink").code == 0
    assert not [path for path in output.rglob("*") if path.is_symlink()]
    assert read_tensors(output / "main")


def refuse(*arguments: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_auto_falls_back_to_a_copy(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(links.fcntl, "ioctl", refuse)
    assert export(pristine, output).code == 0
    assert not [name for name, facts in shards_of(output).items() if "link" in facts]


@pytest.mark.parametrize("way", ["hardlink", "reflink"])
def test_a_way_asked_for_by_name_is_not_replaced(
    way: str, pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(links.fcntl, "ioctl", refuse)
    outcome = export(pristine, output, "--link", way)
    assert outcome.code == 4
    assert way in outcome.err
    assert not output.exists()
    assert not list(output.parent.glob(".*"))


def test_reflink_is_tried_first(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system with shared extents, imitated: the call copies the bytes."""

    def clone(target: int, request: int, source: int) -> None:
        assert request == 0x40049409
        os.sendfile(target, source, 0, os.fstat(source).st_size)

    monkeypatch.setattr(links.fcntl, "ioctl", clone)
    assert export(pristine, output).code == 0
    linked = [facts["link"] for facts in shards_of(output).values() if "link" in facts]
    assert set(linked) == {"reflink"}
    assert all(path.stat().st_nlink == 1 for path in (output / "main").iterdir())


def test_each_device_is_tried_for_itself(source: Path, output: Path) -> None:
    """A file on another file system is copied, the others are linked all the same."""
    elsewhere = Path("/dev/shm") / f"mtp-export-test-{os.getpid()}.safetensors"
    if source.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("needs two file systems")
    shard = source / "model-00002-of-00008.safetensors"
    elsewhere.write_bytes(shard.read_bytes())
    try:
        found = links.resolve_links(Link.AUTO, [shard, elsewhere], output)
        assert found == {shard: Link.HARDLINK, elsewhere: Link.COPY}
    finally:
        elsewhere.unlink()


def test_a_dry_run_touches_nothing(pristine: Path, output: Path) -> None:
    before = output.parent.stat().st_mtime_ns
    assert export(pristine, output, "--dry-run").code == 0
    assert output.parent.stat().st_mtime_ns == before
