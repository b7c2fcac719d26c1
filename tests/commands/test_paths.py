"""No command writes into what it reads, whatever the options: every pair of paths of every command
is tried, as its dataclass describes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import get_args

import pytest

from cases import Outcome, export, quantize, run_program, tree
from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.commands.names import COMMANDS
from mtp_export.commands.registry import command_named, program
from mtp_export.commands.typed_command import QuickCommand, QuickGroup
from mtp_export.commands.typed_option import Leaf
from mtp_export.options import Access
from mtp_export.paths import refuse_overlaps

PROGRAM = "export"
# Values of options that a command cannot do without, other than paths.
NEEDED = {"NAME": "org/name", "--engine": "vllm"}


def leaves_of(name: str) -> list[Leaf]:
    command = program() if name == PROGRAM else command_named(name)
    assert isinstance(command, QuickCommand | QuickGroup)
    return list(command.leaves.values())


def takes_path(leaf: Leaf) -> bool:
    return not {Path, Place}.isdisjoint(get_args(leaf.hint) or (leaf.hint,))


def pairs() -> Iterator[tuple[str, Leaf, Leaf]]:
    """Each path that a command writes with each other of its paths."""
    for name in (PROGRAM, *COMMANDS):
        paths = [leaf for leaf in leaves_of(name) if takes_path(leaf)]
        for written in (leaf for leaf in paths if leaf.option.access is Access.WRITTEN):
            yield from ((name, written, other) for other in paths if other is not written)


def words(leaf: Leaf, value: object) -> list[object]:
    return [value] if leaf.option.is_argument else [leaf.flag, value]


def run_with(name: str, paths: Mapping[Leaf, Path], folder: Path) -> Outcome:
    """A command with some paths, and others in a folder where it cannot do without."""
    values: dict[Leaf, object] = dict(paths)
    leaves = leaves_of(name)
    last = max((place for place, leaf in enumerate(leaves) if leaf in paths), default=0)
    for place, leaf in enumerate(leaves):
        comes_before = leaf.option.is_argument and leaves[last].option.is_argument and place < last
        if leaf not in paths and (leaf.field.default is MISSING or comes_before):
            other = folder / f"of {leaf.field.name}" if takes_path(leaf) else NEEDED[leaf.flag]
            values[leaf] = other
    arguments = [word for leaf in leaves if leaf in values for word in words(leaf, values[leaf])]
    return run_program(*([] if name == PROGRAM else [name]), *arguments)


@pytest.mark.parametrize("name", [PROGRAM, *COMMANDS])
def test_every_path_says_what_is_done_with_it(name: str) -> None:
    for leaf in leaves_of(name):
        assert takes_path(leaf) == (leaf.option.access is not None), leaf.flag


PAIRS = list(pairs())


@pytest.mark.parametrize(
    ("name", "written", "other"),
    PAIRS,
    ids=[f"{name} {written.flag} {other.flag}" for name, written, other in PAIRS],
)
def test_what_is_written_overlaps_nothing(
    name: str, written: Leaf, other: Leaf, tmp_path: Path
) -> None:
    folder = tmp_path / "given"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside/file").write_text("as it was")
    (tmp_path / "link").symlink_to(folder)
    before = tree(tmp_path)
    for target, place in (
        (folder, folder),
        (folder / "new", folder),
        (folder / "inside/file", folder),
        (folder, folder / "inside"),
        (tmp_path / "link/new", folder),
    ):
        outcome = run_with(name, {written: target, other: place}, tmp_path)
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert "must lie apart" in outcome.err and written.flag in outcome.err, outcome.err
        assert tree(tmp_path) == before


@pytest.mark.parametrize("name", [PROGRAM, *COMMANDS])
def test_a_path_that_is_too_long_is_refused(name: str, tmp_path: Path) -> None:
    """By its names, also below a folder that is not there, and as a whole."""
    for leaf in filter(takes_path, leaves_of(name)):
        for path, found in (
            (tmp_path / ("é" * 128), ": 256 bytes, "),
            (tmp_path / "missing" / ("n" * 300) / "b", ": 300 bytes, "),
            (Path("/" + "/".join(["n" * 250] * 17)), f": 250 bytes, {17 * 251} in all"),
        ):
            outcome = run_with(name, {leaf: path}, tmp_path)
            assert (outcome.code, outcome.out) == (2, ""), outcome
            assert f"The path of {leaf.flag} is too long" in outcome.err
            assert found in outcome.err, outcome.err
    assert tree(tmp_path) == {}


def test_what_is_written_has_room_for_files_below_it() -> None:
    """4096 bytes are too many for Linux, and files of a bundle have names of up to 255."""
    for size_bytes, fits in ((4095 - 512, True), (4096 - 512, False)):
        names = "/" + "/".join(["n" * 99] * 40)
        path = Path(names[:size_bytes])
        assert len(str(path)) == size_bytes
        refuse_overlaps({"--input-dir": path}, {})
        if fits:
            refuse_overlaps({}, {"--output-dir": path})
        else:
            with pytest.raises(UsageError, match="--output-dir is too long"):
                refuse_overlaps({}, {"--output-dir": path})


def test_names_of_a_file_system_with_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_long(path: Path) -> None:
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    monkeypatch.setattr(Path, "lstat", too_long)
    with pytest.raises(UsageError, match="or fewer where the file system says so"):
        refuse_overlaps({}, {"--output-dir": tmp_path / "new"})


def test_a_bundle_whose_path_cannot_be_printed_is_refused(source: Path, tmp_path: Path) -> None:
    """The command that serves it would name another folder."""
    folder = tmp_path / os.fsdecode(b"b\xff\x01")
    pair = ("--base-quant", "bf16", "--mtp-quant", "bf16")
    good = tmp_path / "good"
    assert export(source, good, "--quiet").code == 0
    data = ("--data", source / "config.json")
    for outcome in (
        export(source, folder),
        export(source, folder, "--dry-run"),
        export(source, folder / "below", "--share", "1/2"),
        quantize(source, folder, *pair),
        run_program("graft", "--main", source, "--mtp", good, "--output-dir", folder),
        run_program("tune", "--bundle", good, *data, "--output-dir", folder, "--dry-run"),
        run_program("finish", folder),
        run_program("launch", folder, "--engine", "vllm"),
    ):
        assert (outcome.code, outcome.out) == (2, ""), outcome
        assert "is not UTF-8" in outcome.err and "\\udcff" in outcome.err
    assert not folder.exists()
    source.rename(folder)  # whose default output lies beside it
    outcome = run_program("quantize", "--input-dir", folder, *pair)
    assert outcome.code == 2 and "is not UTF-8" in outcome.err
    assert export(folder, tmp_path / "output", "--quiet").code == 0, "a source may be called so"
    assert {path.name for path in tmp_path.iterdir()} == {"good", folder.name, "output"}


def test_links_and_mounts_are_seen_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard link is another name of a file, and a second mount one of a folder."""
    source, other = tmp_path / "source", tmp_path / "other"
    (source / "part").mkdir(parents=True)
    (source / "part/config.json").write_text("{}")
    os.link(source / "part/config.json", tmp_path / "report.json")
    with pytest.raises(UsageError, match=r"is by a link a file of .*source"):
        refuse_overlaps({"SRC": source}, {"--report": tmp_path / "report.json"})
    (tmp_path / "new.json").write_text("{}")
    refuse_overlaps({"SRC": source}, {"--report": tmp_path / "new.json"})
    other.mkdir()
    refuse_overlaps({"SRC": source}, {"--report": other / "r.json"})
    as_mounted, real = source.stat(), Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        return as_mounted if path == other else real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(UsageError, match="lies in"):
        refuse_overlaps({"SRC": source}, {"--report": other / "r.json"})


def test_links_in_what_is_read_are_seen_through(tmp_path: Path) -> None:
    """Files of the Hub's cache are links to its blobs, and a bundle's part may be one too; a link
    may also lead nowhere."""
    blobs, snapshot, part = (tmp_path / name for name in ("blobs", "snapshot", "elsewhere/main"))
    for folder in (blobs, snapshot, part):
        folder.mkdir(parents=True)
    for path in (blobs / "one", blobs / "other", part / "config.json"):
        path.write_text("{}")
    (snapshot / "config.json").symlink_to("../blobs/one")
    (snapshot / "main").symlink_to(part)
    (snapshot / "loop").symlink_to("loop")
    for written, relation in (
        (blobs / "one", "is by a link a file of"),
        (blobs, "is what a link leads to in"),
        (part, "is what a link leads to in"),
        (part / "new.json", "lies in what a link leads to in"),
        (part.parent, "contains what a link leads to in"),
    ):
        with pytest.raises(UsageError, match=f"--report {relation} .*snapshot"):
            refuse_overlaps({"SRC": snapshot}, {"--report": written})
    refuse_overlaps({"SRC": snapshot}, {"--report": blobs / "other"})
    refuse_overlaps({"SRC": snapshot}, {"--report": part.parent / "new.json"})


def test_a_terminal_may_be_read_and_written() -> None:
    refuse_overlaps({"--prompts": Path("/dev/null")}, {"--report": Path("/dev/null")})
    with pytest.raises(UsageError, match="must lie apart"):
        refuse_overlaps({}, {"--report": Path("/dev/null"), "--junit": Path("/dev/null")})


@pytest.mark.parametrize("make", [export, quantize])
def test_shares_are_finished_without_a_report_in_their_source(
    make: Callable[..., Outcome], source: Path, output: Path
) -> None:
    """The source is known from the shares alone."""
    bf16 = () if make is export else ("--base-quant", "bf16", "--mtp-quant", "bf16")
    assert make(source, output, *bf16, "--share", "1/1", "--quiet").code == 0
    before = tree(source)
    outcome = run_program("finish", output, "--report", source / "config.json", "--quiet")
    assert (outcome.code, "--report lies in" in outcome.err) == (2, True), outcome.err
    assert tree(source) == before


def test_defaults_overlap_nothing_either(source: Path, bundle: Path, tmp_path: Path) -> None:
    """The output of quantize is beside its input, and the work folder of tune beside its output."""
    beside = bundle.with_name(f"{bundle.name}-bf16-bf16")
    pair = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--dry-run")
    report = ("--report", beside / "r.json")
    outcome = run_program("quantize", "--input-dir", bundle, *pair, *report)
    assert (outcome.code, "must lie apart" in outcome.err) == (2, True), outcome.err
    places = ("--bundle", bundle, "--data", source / "config.json", "--output-dir", tmp_path / "t")
    report = ("--report", tmp_path / "t-work/r.json")
    outcome = run_program("tune", *places, *report, "--dry-run")
    assert (outcome.code, "the work folder" in outcome.err) == (2, True), outcome.err


@pytest.fixture
def bundle(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    assert export(source, folder, "--quiet").code == 0
    return folder
