"""Memory that is free by files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_checkpoints import free_memory
from mtp_checkpoints.free_memory import free_memory as limits

AVAILABLE, CONTAINER = "available memory", "a container's limit"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of control groups, of which this process is in /a/b."""
    for name in ("_MEMINFO", "_OWN_GROUPS", "_ROOT"):
        monkeypatch.setattr(free_memory, name, tmp_path / name.lower())
    (tmp_path / "_own_groups").write_text("4:memory:/a/b\n3:cpuset:/\n0::/a/b\n")
    return tmp_path / "_root"


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_available_memory(root: Path) -> None:
    assert limits() == {}
    meminfo = root.parent / "_meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4 kB\nHugePages_Total:  0\n\n")
    assert limits() == {AVAILABLE: 4096}
    meminfo.write_text("MemTotal: 9 kB\n")
    assert limits() == {}


def test_what_a_group_uses_is_not_free_but_for_files(root: Path) -> None:
    group(root / "a/b", memory__max=1000, memory__current=700)
    assert limits() == {CONTAINER: 300}
    stat = "anon 500\ninactive_file 50\nactive_file 20\nslab_reclaimable 5\nworkingset x"
    group(root / "a/b", memory__stat=stat)
    assert limits() == {CONTAINER: 375}
    group(root / "a/b", memory__high=900)
    assert limits() == {CONTAINER: 275}
    group(root / "a/b", memory__current=5000)
    assert limits() == {CONTAINER: 0}


def test_the_least_of_all_groups_above(root: Path) -> None:
    group(root / "a/b", memory__max="max", memory__current=7)
    assert limits() == {}
    group(root / "a", memory__max=1000, memory__current=7)
    assert limits() == {CONTAINER: 993}
    group(root, memory__max=500, memory__current=7)
    assert limits() == {CONTAINER: 493}


def test_a_container_that_sees_its_own_group_as_the_root(root: Path) -> None:
    group(root, memory__max=500, memory__current=7)
    assert limits() == {CONTAINER: 493}


def test_version_1(root: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 20"
    group(root / "memory/a", memory__limit_in_bytes=1000, memory__usage_in_bytes=700)
    group(root / "memory/a", memory__stat=stat)
    assert limits() == {CONTAINER: 370}
    unlimited = 9223372036854771712
    group(root / "memory/a", memory__limit_in_bytes=unlimited)
    assert limits() == {}
