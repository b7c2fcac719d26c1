"""A journal one call at a time: what a run takes over, and the words with which it is refused."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mtp_checkpoints.errors import IoError, OutputExistsError
from mtp_checkpoints.sources.files import name_when_whole
from mtp_export.bundle.journal import (
    JOURNAL_NAME,
    DamagedJournal,
    Journal,
    JournalContent,
    ShardFacts,
    encoded,
    journaled,
    parsed,
    shard_line,
)
from mtp_export.bundle.options import Share

DIGEST = "0123456789abcdef" * 2
FACTS = ShardFacts(8, "hardlink", {"a": DIGEST}, {"a": {"sqnr_db": None, "max_error": 0.5}})
IDENTITY: dict[str, Any] = {
    "options": {"part": "both", "target": "hf"},
    "source": {"shards": {"x": 1}},
    "versions": {"x": 5},
}


def raw_of(*lines: dict[str, Any]) -> bytes:
    checksum = xxhash.xxh3_128()
    return b"".join(encoded(line, checksum) for line in lines)


HEAD = {"identity": IDENTITY, "files": ["main/b", "main/a"]}


def test_lines_carry_the_checksum_of_all_before_them() -> None:
    first, second = b'{"a":1}', b'{"b":[2]}'
    both = xxhash.xxh3_128(first + second).hexdigest().encode()
    alone = xxhash.xxh3_128(first).hexdigest().encode()
    assert (
        raw_of({"a": 1}, {"b": [2]}) == first + b" " + alone + b"\n" + second + b" " + both + b"\n"
    )


def test_content_becomes_lines_and_lines_content() -> None:
    files, command = frozenset({"main/b", "main/a"}), ("export", "--part", "mtp")
    content = JournalContent(IDENTITY, files, {"main/1": FACTS}, command)
    lines = list(content.lines())
    assert lines == [
        {
            "identity": IDENTITY,
            "files": ["main/a", "main/b"],
            "command": ["export", "--part", "mtp"],
        },
        {
            "finished": "main/1",
            "facts": {
                "size_bytes": 8,
                "link": "hardlink",
                "xxh3_128": {"a": DIGEST},
                "facts": {"a": {"sqnr_db": None, "max_error": 0.5}},
            },
        },
    ]
    assert lines[1] == shard_line("main/1", FACTS)
    assert parsed(raw_of(*lines)) == content
    assert ShardFacts(3) == ShardFacts(3, None, None, {})
    assert JournalContent({}, frozenset()).finished == {}


def damage(raw: bytes) -> str:
    with pytest.raises(DamagedJournal) as caught:
        parsed(raw)
    return str(caught.value)


def test_damage_is_named_by_its_line() -> None:
    good = raw_of(HEAD, shard_line("main/1", FACTS), shard_line("main/2", ShardFacts(3)))
    assert list(parsed(good).finished) == ["main/1", "main/2"]
    assert list(parsed(good[:-1]).finished) == ["main/1"]
    assert list(parsed(good[:-2] + b"x\n").finished) == ["main/1"]
    assert damage(b"") == damage(b"abc") == "no whole line"
    assert damage(b"x" + good) == "line 1 with another checksum than its own"
    assert damage(good.replace(b"main/1", b"main/3")) == "line 2 with another checksum than its own"
    found = damage(raw_of(HEAD, {"facts": {}}))
    assert found.startswith("line 2 that this version did not write (TypeError: ")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"size_bytes": "8"}, "TypeError: str in place of int"),
        ({"size_bytes": True}, "TypeError: bool in place of int"),
        ({"size_bytes": 8, "link": 3}, "TypeError: int in place of str"),
        ({"size_bytes": 8, "xxh3_128": ["a"]}, "TypeError: list in place of dict"),
        ({"size_bytes": 8, "xxh3_128": {"a": 5}}, "TypeError: int in place of str"),
        (
            {"size_bytes": 8, "xxh3_128": {"a": DIGEST[2:]}},
            "ValueError: a checksum of another leng",
        ),
        ({"size_bytes": 8, "xxh3_128": {"a": DIGEST + "00"}}, "ValueError: a checksum of another"),
        ({"size_bytes": 8, "facts": []}, "TypeError: list in place of dict"),
        ({"size_bytes": 8, "facts": {"a": 5}}, "TypeError: int in place of dict"),
        ({"size_bytes": 8, "facts": {"a": {"b": "c"}}}, "TypeError: str in place of int"),
    ],
)
def test_facts_that_this_tool_does_not_write(facts: dict[str, Any], says: str) -> None:
    assert says in damage(raw_of(HEAD, {"finished": "main/1", "facts": facts}))


@pytest.mark.parametrize(
    "line",
    [
        {"identity": None, "files": []},
        {"identity": {}, "files": {}},
        {"identity": {}, "files": [3]},
        {"identity": {}, "files": [], "command": "export"},
        {"identity": {}, "files": [], "command": [3]},
        {"identity": {}},
        {"files": []},
    ],
)
def test_runs_that_this_tool_does_not_write(line: dict[str, Any]) -> None:
    assert damage(raw_of(line)).startswith("line 1 that this version did not write")


def refused(output: Path, identity: dict[str, Any]) -> OutputExistsError:
    with Journal(output) as journal, pytest.raises(OutputExistsError) as refusal:
        journal.resume(identity)
    return refusal.value


@pytest.fixture
def begun(output: Path) -> Path:
    with Journal(output) as journal:
        assert journal.is_empty
        journal.begin(IDENTITY, {"main/a"})
        assert (journal.is_empty, journal.files, journal.finished) == (False, {"main/a"}, {})
        journal.record("main/1", FACTS)
    return output


def test_a_run_of_the_same_identity_goes_on(begun: Path) -> None:
    with Journal(begun) as journal:
        journal.resume(dict(IDENTITY))
        assert (journal.files, journal.finished) == ({"main/a"}, {"main/1": FACTS})
        journal.record("main/2", ShardFacts(3))
    with Journal(begun) as journal:
        journal.resume(IDENTITY)
        assert list(journal.finished) == ["main/1", "main/2"]
        journal.remove()
    assert not begun.exists()


@pytest.mark.parametrize(
    ("changes", "source", "expected", "found"),
    [
        (
            {"options": {"part": "mtp", "target": "hf"}},
            False,
            "options part both",
            "options part mtp",
        ),
        ({"options": {"part": "both"}}, False, "options target hf", "options target None"),
        ({"source": {"shards": {"x": 2}}}, True, "source shards x 1", "source shards x 2"),
        ({"versions": {"x": 6}}, True, "versions x 5", "versions x 6"),
        (
            {"versions": {"x": 6}, "options": {}},
            False,
            "options part both",
            "options part None",
        ),
    ],
)
def test_another_identity_is_refused_by_its_first_difference(
    changes: dict[str, Any], source: bool, expected: str, found: str, begun: Path
) -> None:
    error = refused(begun, IDENTITY | changes)
    what = (
        "The source changed since the unfinished run in this output folder began"
        if source
        else "The output folder holds an unfinished run of something else"
    )
    assert (error.what, error.where) == (what, begun)
    assert error.expected == f"{expected} (in the unfinished run)"
    assert error.found == f"{found} (now)"
    assert str(error.todo).startswith("Pass --no-resume to start over")
    assert ("own command" in str(error)) is not source


def test_a_refusal_ends_with_the_command_of_the_earlier_run(output: Path, tmp_path: Path) -> None:
    """A line without it, as of a run that no command began, is none of damage."""
    assert parsed(raw_of(HEAD)).again(output) == ""
    with Journal(output) as journal:
        journal.begin(IDENTITY, set(), ("export", "--input-dir", "/a b"))
    error = refused(output, IDENTITY | {"options": {}})
    command = f"mtp-export export --input-dir '/a b' --output-dir {output}"
    assert error.command == command and str(error).endswith(f" by its own command: {command}")
    run = journaled(output)
    assert run is not None
    assert run.again(tmp_path, Share(2, 3)).endswith(f" --output-dir {tmp_path} --share 2/3")
    assert replace(run, command=("export", "\x1b[2J")).again(output) == ""


def test_a_damaged_journal_is_refused(begun: Path) -> None:
    journal = begun / JOURNAL_NAME
    journal.write_bytes(b"x" + journal.read_bytes())
    error = refused(begun, IDENTITY)
    assert error.what == "The journal of the unfinished run is damaged"
    assert (error.where, error.todo) == (journal, "Pass --no-resume to start over")
    assert str(error.expected).startswith("the lines that an unfinished run")
    assert str(error.found) == "line 1 with another checksum than its own"
    assert journaled(begun) is None


def test_files_of_a_journal_without_taking_it_over(begun: Path, tmp_path: Path) -> None:
    run = journaled(begun)
    assert run is not None and run.files == {"main/a"} and run.finished
    assert journaled(tmp_path / "none") is None
    with (begun / JOURNAL_NAME).open("ab") as file:
        file.write(b"garbage\n" * 3)
    damaged = journaled(begun)
    assert damaged is not None and damaged.files == {"main/a"} and damaged.finished == {}


def test_one_run_at_a_time(begun: Path) -> None:
    with Journal(begun) as journal:
        for _ in range(2):
            with pytest.raises(OutputExistsError) as refusal:
                Journal(begun)
            assert str(refusal.value.what).startswith("Another run is writing this output")
            assert refusal.value.where == begun
            assert str(refusal.value.todo).startswith("Wait for it to end")
            journal.begin({}, set())
    Journal(begun).__exit__(None, None, None)


def test_a_journal_that_was_replaced_before_it_was_locked(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the other run ended between opening and locking."""
    real = os.open

    def replaced(path: Any, flags: int, *more: Any) -> int:
        fd = real(path, flags, *more)
        if Path(path).name == JOURNAL_NAME:
            Path(path).unlink()
        return fd

    monkeypatch.setattr(os, "open", replaced)
    with pytest.raises(OutputExistsError, match="has just finished it"):
        Journal(begun)


def test_descriptors_are_closed(begun: Path) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = held()
    with Journal(begun) as journal:
        with pytest.raises(OutputExistsError):
            Journal(begun)
        journal.begin({}, set())
        journal.begin({}, set())
        assert held() == before + 1
    assert held() == before


def test_a_journal_brings_its_lines_to_disk(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with Journal(begun) as journal:
        journal.begin(IDENTITY, set())
        owner, temporary, *more = synced
        assert (owner, name_when_whole(temporary)) == (".mtp_export.owner", JOURNAL_NAME)
        assert more == [begun.name]
        synced.clear()
        journal.record("main/1", FACTS)
        assert synced == [JOURNAL_NAME]
        journal.remove()
        assert synced[1:] == [begun.name, begun.name]


def test_a_journal_that_cannot_be_read(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == JOURNAL_NAME:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(IoError) as refusal:
        journaled(begun)
    assert (refusal.value.where, refusal.value.found) == (
        begun / JOURNAL_NAME,
        "Input/output error",
    )
