"""Journals that were damaged, edited or cut short: refused with their own message, or the last
shard is made again; nothing that they say falsely reaches a manifest."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from bundle.commands import UNFINISHED
from cases import export, tree
from disk import Fault, watched_disk
from mtp_checkpoints.errors import IoError, OutputExistsError
from mtp_export.bundle.journal import (
    JOURNAL_NAME,
    DamagedJournal,
    Journal,
    ShardFacts,
    encoded,
    journaled,
    parsed,
)

FACTS = ShardFacts(8, xxh3_128={"a": "0" * 32}, facts={"a": {"sqnr_db": None, "max_error": 0.5}})


@pytest.fixture(scope="module")
def whole(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundle of an undisturbed run."""
    output = tmp_path_factory.mktemp("whole") / "output"
    assert export(pristine, output, *UNFINISHED).code == 0
    return tree(output)


def lines_of(output: Path) -> list[bytes]:
    return (output / JOURNAL_NAME).read_bytes().splitlines(keepends=True)


def check_refused(source: Path, output: Path, whole: dict[str, bytes]) -> None:
    """The journal's own message, which says how to go on, and nothing touched; then that works."""
    before = tree(output)
    outcome = export(source, output, *UNFINISHED)
    assert outcome.code == 8, outcome.err
    assert "journal of the unfinished run is damaged" in outcome.err
    assert "--no-resume" in outcome.err
    assert tree(output) == before
    assert export(source, output, *UNFINISHED, "--no-resume").code == 0
    assert tree(output) == whole


LINES = [b"\xff\xfe garbage\n", b"{}\n", b"[" * 100_000 + b"\n", b"\n", b'{"finished": "x"}\n', b""]


@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_line(
    place: int, source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    """The first, which says what the run is, or one of a shard; also one that is gone."""
    lines = lines_of(unfinished)
    for line in LINES:
        lines[place] = line
        with pytest.raises(DamagedJournal):
            parsed(b"".join(lines))
    (unfinished / JOURNAL_NAME).write_bytes(b"".join(lines))
    check_refused(source, unfinished, whole)


@pytest.mark.parametrize("line", [1, -1])
def test_an_edited_checksum_reaches_no_manifest(
    line: int, source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    lines = lines_of(unfinished)
    place = lines[line].index(b'"xxh3_128":{') + 60
    place = lines[line].index(b'":"', place) + 3
    digit = b"0" if lines[line][place : place + 1] != b"0" else b"1"
    lines[line] = lines[line][:place] + digit + lines[line][place + 1 :]
    (unfinished / JOURNAL_NAME).write_bytes(b"".join(lines))
    if line == 1:
        check_refused(source, unfinished, whole)
    assert line == 1 or export(source, unfinished, *UNFINISHED).code == 0
    assert tree(unfinished) == whole


# Edits of a line's JSON by somebody who mends the checksums too.
def _shard(change: Callable[[dict[str, Any]], object]) -> Callable[[list[Any]], object]:
    return lambda lines: change(lines[1]["facts"])


FORGERIES: dict[str, Callable[[list[Any]], object]] = {
    "no object": lambda lines: lines.__setitem__(1, []),
    "no identity": lambda lines: lines[0].pop("identity"),
    "an identity of null": lambda lines: lines[0].update(identity=None),
    "files that are no names": lambda lines: lines[0].update(files=[3]),
    "no files": lambda lines: lines[0].pop("files"),
    "no key": lambda lines: lines[1].update(finished=None),
    "no facts": lambda lines: lines[1].pop("facts"),
    "no size": _shard(lambda facts: facts.pop("size_bytes")),
    "a size as text": _shard(lambda facts: facts.update(size_bytes="8")),
    "a link of its own kind": _shard(lambda facts: facts.update(link=["hardlink"])),
    "checksums that are a list": _shard(lambda facts: facts.update(xxh3_128=["0" * 32])),
    "a checksum that is none": _shard(lambda facts: facts["xxh3_128"].update(x="zz")),
    "a short checksum": _shard(lambda facts: facts["xxh3_128"].update(x="00")),
    "figures that are text": _shard(lambda facts: facts.update(facts={"x": {"sqnr_db": "high"}})),
    "another field": _shard(lambda facts: facts.update(more=1)),
}


def forge(lines: list[bytes], change: Callable[[list[Any]], object]) -> bytes:
    values = [json.loads(line.rpartition(b" ")[0]) for line in lines]
    change(values)
    checksum = xxhash.xxh3_128()
    return b"".join(encoded(value, checksum) for value in values)


def test_what_this_tool_does_not_write(
    source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    lines = lines_of(unfinished)
    assert len(parsed(forge(lines, lambda _: None)).finished) == 3
    for name, change in FORGERIES.items():
        with pytest.raises(DamagedJournal):
            pytest.fail(f"{name} was taken: {parsed(forge(lines, change))}")
    (unfinished / JOURNAL_NAME).write_bytes(forge(lines, FORGERIES["no object"]))
    check_refused(source, unfinished, whole)


def test_facts_of_other_tensors_are_not_believed(
    source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    """The shard is made again, as one that is not in the journal."""
    forged = forge(lines_of(unfinished), _shard(lambda facts: facts["xxh3_128"].popitem()))
    (unfinished / JOURNAL_NAME).write_bytes(forged)
    assert export(source, unfinished, *UNFINISHED).code == 0
    assert tree(unfinished) == whole


def test_an_identity_that_differs_in_a_null(source: Path, unfinished: Path) -> None:
    forged = forge(lines_of(unfinished), lambda lines: lines[0]["identity"].update(more=None))
    (unfinished / JOURNAL_NAME).write_bytes(forged)
    outcome = export(source, unfinished, *UNFINISHED)
    assert (outcome.code, "more None" in outcome.err) == (8, True), outcome.err


def test_a_last_line_that_was_cut_short_is_no_damage(
    source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    """Its shard is made again; of a line of several pages the last may have come to disk alone."""
    journal = unfinished / JOURNAL_NAME
    raw = journal.read_bytes()
    assert len(parsed(raw[:-1]).finished) == 2
    for cut in (2, 20, 33, 34, 200):
        for rest in (b"", b"\0" * (cut - 1), b"\0" * (cut - 1) + b"\n"):
            assert len(parsed(raw[:-cut] + rest).finished) == 2
    journal.write_bytes(raw[:-200] + b"\0" * 199 + b"\n")
    assert export(source, unfinished, *UNFINISHED).code == 0
    assert tree(unfinished) == whole


def test_every_flipped_byte_is_noticed(unfinished: Path) -> None:
    raw = (unfinished / JOURNAL_NAME).read_bytes()
    said, last = parsed(raw), raw.rindex(b"\n", 0, -1) + 1
    for place in range(0, len(raw), 7):
        flipped = raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]
        if place < last:
            with pytest.raises(DamagedJournal):
                parsed(flipped)
        else:
            found = parsed(flipped)
            assert (found.identity, found.files) == (said.identity, said.files)
            assert list(found.finished) == list(said.finished)[:-1]


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_journal_that_is_no_file(kind: str, source: Path, output: Path) -> None:
    """Refused at once; a link is not followed."""
    victim = output.with_name("victim")
    victim.write_text("years of work")
    output.mkdir()
    journal = output / JOURNAL_NAME
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to(victim), "folder": Path.mkdir}[kind](
        journal
    )
    for option in ((), ("--no-resume",), ("--overwrite",)):
        outcome = export(source, output, *option)
        assert outcome.code in (6, 8), outcome.err
        assert JOURNAL_NAME in outcome.err
    assert victim.read_text() == "years of work"


def test_a_line_that_could_not_be_written_is_written_over(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other workers may record a shard after the disk failed."""
    real = os.pwrite
    with Journal(output) as journal:
        journal.begin({"a": 1}, {"main/x"})
        journal.record("main/1", FACTS)

        def half(fd: int, data: memoryview, place: int) -> int:
            real(fd, data[: len(data) // 2], place)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            with pytest.raises(IoError, match="filled up"):
                journal.record("main/a long name, so that more of it is left", FACTS)
        with (
            watched_disk(Fault("fsync", 1, errno.EIO, lasts=False)),
            pytest.raises(IoError),
        ):
            journal.record("main/not on the disk", FACTS)
        journal.record("main/2", ShardFacts(3))
    with Journal(output) as journal:
        journal.resume({"a": 1})
        assert journal.finished == {"main/1": FACTS, "main/2": ShardFacts(3)}
        run = journaled(output)
        assert run is not None and journal.files == run.files == {"main/x"}


def test_a_journal_that_begins_anew_keeps_its_lock(output: Path) -> None:
    with Journal(output) as journal:
        journal.begin({"a": 1}, set())
        journal.begin({"a": 2}, set())
        with pytest.raises(OutputExistsError, match="Another run"):
            Journal(output)
    Journal(output).remove()
    assert not output.exists()
