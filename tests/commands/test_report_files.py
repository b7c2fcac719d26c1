"""Reports at paths that a user names: tried before the work, whole or not at all, nothing replaced
that is no regular file."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cases import Outcome, export, quantize, read_json, run_program, tree

Plan = Callable[[object], Outcome]  # runs the command with a path as --report


@pytest.fixture(scope="module")
def bundle(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, not to be changed."""
    folder = tmp_path_factory.mktemp("reports") / "bundle"
    assert export(pristine, folder, "--quiet").code == 0
    return folder


@pytest.fixture
def plan(pristine: Path, output: Path) -> Plan:
    """The quickest command that reports: a dry run."""
    return lambda path: export(pristine, output, "--dry-run", "--quiet", "--report", path)


def is_plan(text: str | bytes) -> bool:
    """Return True for the whole report of that command."""
    return {"parts", "disk_bytes", "memory_bytes"} <= set(json.loads(text))


def reported(plan: Plan, path: object, read: Callable[[], bytes]) -> bytes:
    """Report to a path that is no file while a thread reads what arrives there."""
    arrived: list[bytes] = []
    reader = threading.Thread(target=lambda: arrived.append(read()), daemon=True)
    reader.start()
    outcome = plan(path)
    assert outcome.code == 0, outcome.err
    reader.join()
    return arrived[0]


def test_a_named_pipe_stays_one_and_its_reader_gets_the_report(plan: Plan, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert is_plan(reported(plan, pipe, pipe.read_bytes))
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_to(plan: Plan) -> None:
    ours, theirs = os.openpty()

    def read() -> bytes:
        data = b""
        while not data.endswith(b"\n}\r\n"):
            data += os.read(ours, 1 << 16)
        return data

    name = os.ttyname(theirs)
    assert is_plan(reported(plan, name, read))
    assert stat.S_ISCHR(os.stat(name).st_mode)
    os.close(theirs)
    os.close(ours)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_leads_to_the_report(exists: bool, plan: Plan, tmp_path: Path) -> None:
    target, link = tmp_path / "elsewhere/r.json", tmp_path / "links/r.json"
    for path in (target, link):
        path.parent.mkdir()
    link.symlink_to(Path("../elsewhere/r.json"))
    if exists:
        target.write_text("old")
        target.chmod(0o640)
        kept = target.open()  # an open file keeps its bytes: it is replaced, not written over
    assert plan(link).code == 0
    assert link.is_symlink()
    assert is_plan(target.read_bytes())
    assert [path.name for path in target.parent.iterdir()] == ["r.json"]
    if exists:
        assert kept.read() == "old"
        kept.close()
        assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_an_open_descriptor_is_written_where_it_stands(plan: Plan, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before\n")
        log.flush()
        number = os.fstat(log.fileno()).st_ino
        (tmp_path / "link").symlink_to(f"/dev/fd/{log.fileno()}")
        assert plan(tmp_path / "link").code == 0
        log.write(b"after\n")
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(b"before\n") and text.endswith(b"after\n")
    assert is_plan(text.removeprefix(b"before\n").removesuffix(b"after\n"))
    assert (tmp_path / "log").stat().st_ino == number


def unusable_places(folder: Path) -> dict[str, Path]:
    """Paths that no report can be written to, by the words that say why."""
    (folder / "loop").symlink_to("loop")
    (folder / "file").write_text("")
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    return {
        "a folder": folder,
        "No such file or directory": folder / "missing/r.json",
        "Too many levels": folder / "loop",
        "Not a directory": folder / "file/r.json",
        "File name too long": folder / ("r" * 300),
        "Bad file descriptor": Path(f"/dev/fd/{closed}"),
        "reading only": Path("/dev/fd/{read_only}"),
    }


def test_a_place_that_cannot_be_written_is_found_before_the_work(
    source: Path, bundle: Path, output: Path, tmp_path: Path
) -> None:
    read_only = os.open(os.devnull, os.O_RDONLY)
    folder = tmp_path / "places"
    folder.mkdir()
    for words, place in unusable_places(folder).items():
        path = str(place).format(read_only=read_only)
        for outcome in (
            export(source, output, "--report", path),
            quantize(source, output, "--mtp-quant", "bf16", "--report", path),
            *(
                run_program("verify", bundle, "--level", "files", option, path)
                for option in ("--report", "--junit", "--html")
            ),
        ):
            assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
            assert words in outcome.err
            assert not output.exists()
    os.close(read_only)
    assert sorted(path.name for path in folder.iterdir()) == ["file", "loop"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["places", "source"]


def test_nothing_of_the_command_is_a_place_for_a_report(
    pristine: Path, bundle: Path, output: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [1]}\n')
    before = tree(bundle), tree(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(bundle / "main/r.json")
    for arguments in (
        ("--input-dir", pristine, "--output-dir", output, "--report", output),
        ("verify", bundle, "--level", "files", "--html", link),
        ("verify", bundle, "--level", "files", "--prompts", prompts, "--report", prompts),
    ):
        outcome = run_program(*arguments)
        assert (outcome.code, "must lie apart" in outcome.err) == (2, True), outcome.err
    link.unlink()
    assert (tree(bundle), tree(tmp_path)) == before


def test_two_reports_to_one_file_are_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "b").symlink_to("a")
    outcome = run_program("verify", bundle, "--report", tmp_path / "a", "--junit", tmp_path / "b")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--report is" in outcome.err and "(--junit)" in outcome.err
    assert not (tmp_path / "a").exists()


def test_one_report_that_fails_does_not_cost_the_others(bundle: Path, tmp_path: Path) -> None:
    ended, writer = os.pipe()
    os.close(ended)
    outcome = run_program(
        *("verify", bundle, "--level", "files", "--report", f"/dev/fd/{writer}"),
        *("--junit", tmp_path / "r.xml", "--html", tmp_path / "r.html"),
    )
    os.close(writer)
    assert outcome.code == 6
    assert f"/dev/fd/{writer}" in outcome.err
    assert ElementTree.parse(tmp_path / "r.xml").getroot().tag == "testsuites"
    assert "</html>" in (tmp_path / "r.html").read_text()


def test_a_report_that_cannot_be_finished_leaves_the_old_one(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    outcome = plan(path)
    assert (outcome.code, "No space left" in outcome.err) == (6, True)
    assert "goes on" not in outcome.err
    assert tree(tmp_path) == {"r.json": b"old"}


def test_reports_of_a_folder_whose_name_is_no_utf8(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"b\xff\x01")
    folder.symlink_to(bundle)
    files: dict[str, Any] = {end: tmp_path / f"r.{end}" for end in ("json", "xml", "html")}
    outcome = run_program(
        *("verify", folder, "--level", "files", "--report", files["json"]),
        *("--junit", files["xml"], "--html", files["html"]),
    )
    assert outcome.code == 0, outcome.err
    assert "\\udcff" in ElementTree.parse(files["xml"]).getroot().attrib["name"]
    assert read_json(files["json"])["options"]["bundle"] == str(folder)
    assert "\\udcff" in files["html"].read_text()
