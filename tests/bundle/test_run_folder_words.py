"""Files of an output folder call by call: which are this tool's, and in which order they go."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_checkpoints.errors import IoError, OutputExistsError
from mtp_checkpoints.sources.files import temporary_path, write_json
from mtp_export.bundle import run_folder as module
from mtp_export.bundle.run_folder import (
    check_own,
    clear,
    foreign_files,
    is_left_over,
    manifest_files,
    remove_left_overs,
    remove_unfinished,
)

MANIFEST = "mtp_export.json"
FILES = frozenset({"main/config.json", "main/a.safetensors", "mtp/templates/x.jinja"})


def put(output: Path, *names: str) -> Path:
    for name in names:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    return output


def names_in(output: Path) -> list[str]:
    found = (path.relative_to(output) for path in output.rglob("*"))
    return sorted(path.as_posix() for path in found)


def test_the_parts_and_the_names_beside_them() -> None:
    assert module.PARTS == ("main", "mtp", "eagle3", "assistant", "parallel_heads")
    own = (MANIFEST, ".mtp_export.journal", ".mtp_export.shares", ".mtp_export.downloads")
    for name in own:
        assert is_left_over(temporary_path(Path(name)).name)
        assert not is_left_over(name)
    assert is_left_over(".mtp-export-probe-1-2-3-abc")
    for name in ("main", "notes", temporary_path(Path("notes")).name, "x.mtp-export-probe-"):
        assert not is_left_over(name)


def test_files_that_a_manifest_lists(output: Path) -> None:
    assert manifest_files(output) == frozenset()
    output.mkdir()
    assert manifest_files(output) == frozenset()
    shard = {"size_bytes": 1, "tensors": {}}
    file = {"size_bytes": 1, "xxh3_128": "x"}
    content: dict[str, Any] = {
        "format": "mtp-export bundle",
        "format_version": 1,
        "options": {},
        "source": {"shards": {}},
        "parts": {
            "main": {"shards": {"a.safetensors": shard}, "files": {"config.json": file}},
            "mtp": {"shards": {}, "files": {"templates/x.jinja": file}},
        },
    }
    write_json(output / MANIFEST, content)
    assert manifest_files(output) == FILES
    write_json(output / MANIFEST, content | {"format_version": 2})
    assert manifest_files(output) == frozenset()
    (output / MANIFEST).unlink()
    (output / MANIFEST).mkdir()
    assert manifest_files(output) == frozenset()


def test_parts_with_their_own_files_alone(output: Path) -> None:
    check_own(output, FILES)
    put(output, *FILES, "notes", "elsewhere/x")
    temporary_path(output / "main/a.safetensors").touch()
    temporary_path(output / "mtp/templates/x.jinja").touch()
    (output / "main/a.safetensors").unlink()
    check_own(output, FILES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("main/notes", "file"),
        ("main/templates", "folder"),
        ("mtp/templates/y.jinja", "file"),
        ("mtp/x.jinja", "file"),
        ("eagle3", "folder"),
        ("main/templates", "link"),
        ("mtp/config.json", "file"),
        pytest.param(f"main/{temporary_path(Path('notes')).name}", "file", id="temporary"),
        pytest.param(
            f"mtp/{temporary_path(Path('a.safetensors')).name}", "file", id="of another part"
        ),
    ],
)
def test_a_stranger_in_a_part(name: str, kind: str, output: Path) -> None:
    put(output, *FILES)
    make: dict[str, Callable[[Path], object]] = {
        "file": Path.touch,
        "folder": Path.mkdir,
        "link": lambda path: path.symlink_to(output),
    }
    make[kind](output / name)
    before = names_in(output)
    with pytest.raises(OutputExistsError) as refusal:
        check_own(output, FILES)
    error = refusal.value
    assert (error.where, error.found) == (output, name)
    assert error.expected == "only what its manifest or journal lists"
    assert names_in(output) == before


def test_the_words_of_strangers_files(output: Path) -> None:
    error = foreign_files(output, ["a", "b", "c", "d"], "nothing")
    assert error.what == "The output folder holds files that are not part of a bundle"
    assert (error.where, error.expected, error.found) == (output, "nothing", "a, b, c")
    assert error.todo == (
        "Move them elsewhere, or choose another --output-dir; this tool does not remove them, not"
        " even with --overwrite"
    )


def test_what_is_cleared(output: Path) -> None:
    """Not what is kept, nor what somebody else has put beside it; folders that it empties go."""
    put(output, *FILES, MANIFEST, "notes", "main/thesis", "mtp/b.safetensors")
    put(output, "eagle3/config.json", "eagle3/w.safetensors")
    temporary_path(output / "main/a.safetensors").touch()
    temporary_path(output / MANIFEST).touch()
    (output / ".mtp-export-probe-1").mkdir()
    (output / ".mtp-export-probe-1/hardlink").touch()
    own = FILES | {"mtp/b.safetensors", "eagle3/config.json", "eagle3/w.safetensors"}
    clear(output, own, kept={"mtp/b.safetensors"})
    assert names_in(output) == ["main", "main/thesis", "mtp", "mtp/b.safetensors", "notes"]
    clear(output, own)
    assert names_in(output) == ["main", "main/thesis", "notes"]


def test_what_makes_a_bundle_look_whole_goes_first(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is gone for good before anything else goes."""
    put(output, MANIFEST, "main/config.json", "main/a.safetensors", "mtp/config.json")
    (output / "notes").mkdir()
    left = temporary_path(output / MANIFEST)
    left.touch()
    events, unlink = list[str](), os.unlink

    def removing(path: Path) -> None:
        events.append(f"- {Path(path).relative_to(output)}")
        unlink(path)

    def syncing(fd: int) -> None:
        events.append(f"sync {os.path.relpath(os.readlink(f'/proc/self/fd/{fd}'), output)}")

    monkeypatch.setattr(os, "unlink", removing)
    monkeypatch.setattr(os, "fsync", syncing)
    clear(output, FILES | {"mtp/config.json"})
    assert events == [
        f"- {MANIFEST}",
        f"- {left.name}",
        "sync .",
        "- main/config.json",
        "sync main",
        "- mtp/config.json",
        "sync mtp",
        "- main/a.safetensors",
    ]
    assert names_in(output) == ["notes"]


def test_what_runs_left_beside_the_parts_goes(output: Path) -> None:
    put(output, MANIFEST, ".mtp_export.journal", "notes", ".mtp-export-probe-1/x/y")
    shares = temporary_path(output / ".mtp_export.shares")
    put(output, f"{shares.name}/1-of-2/journal")
    temporary_path(output / MANIFEST).touch()
    remove_left_overs(output)
    assert names_in(output) == [".mtp_export.journal", MANIFEST, "notes"]


def test_unfinished_files_that_others_remove_too(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(output, "main/a.safetensors", "main/b.safetensors", "main/config.json")
    temporary_path(output / "main/a.safetensors").touch()
    temporary_path(output / "main/b.safetensors").touch()
    kept = temporary_path(output / "main/c.safetensors")
    kept.touch()
    real = os.unlink

    def removing(path: Path) -> None:
        real(path)
        real(path)  # by another run, a moment before

    monkeypatch.setattr(os, "unlink", removing)
    own = {"main/a.safetensors", "main/b.safetensors"}
    remove_unfinished(output, own, kept={"main/b.safetensors"})
    monkeypatch.undo()
    names = ["main", f"main/{kept.name}", "main/b.safetensors", "main/config.json"]
    assert names_in(output) == names
    remove_unfinished(output, own)
    assert names_in(output) == ["main", f"main/{kept.name}", "main/config.json"]


@pytest.mark.parametrize("call", [clear, remove_unfinished])
def test_a_disk_that_takes_no_removal(
    call: Callable[..., None], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    put(output, *FILES)
    monkeypatch.setattr(os, "unlink", failing)
    with pytest.raises(IoError) as refusal:
        call(output, FILES)
    assert (refusal.value.where, refusal.value.found) == (output, "Read-only file system")


def test_a_part_that_cannot_be_read(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there can."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "mtp":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    put(output, "main/config.json", "mtp/config.json")
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(IoError) as refusal:
        check_own(output, {"main/config.json", "mtp/config.json"})
    assert (str(refusal.value.where), refusal.value.found) == (
        str(output / "mtp"),
        "Permission denied",
    )
