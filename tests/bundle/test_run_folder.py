"""Files of others in an output folder: refused by name and never removed, whatever the options; the
tool's own are replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bundle.commands import UNFINISHED
from cases import edit_json, export, run_in_a_fork, tree
from mtp_checkpoints.sources.files import temporary_path
from mtp_export.bundle.journal import JOURNAL_NAME

STRANGERS: dict[str, Callable[[Path], object]] = {
    "main/thesis.txt": lambda path: path.write_text("years of work"),
    "main/model-99999-of-99999.safetensors": lambda path: path.write_bytes(b"stale"),
    "mtp/notes": lambda path: path.mkdir(),
    "mtp/notes/today.txt": lambda path: (path.parent.mkdir(), path.write_text("work")),
    "main/link": lambda path: path.symlink_to("/"),
    "main/.0123456789ab.thesis.tmp": lambda path: path.write_text("not of ours"),
}


def refused(source: Path, output: Path, name: str, *options: str) -> None:
    before = tree(output)
    outcome = export(source, output, *UNFINISHED, *options)
    assert outcome.code == 8, outcome.err
    assert name in outcome.err
    assert os.path.lexists(output / name)
    assert tree(output) == before


def remove(path: Path) -> None:
    """Remove a stranger, and the folder that came with it."""
    (path.rmdir if path.is_dir() and not path.is_symlink() else path.unlink)()
    if path.parent.name == "notes":
        path.parent.rmdir()


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_strangers_are_refused(state: str, source: Path, unfinished: Path) -> None:
    several: tuple[tuple[str, ...], ...] = ((), ("--overwrite",), ("--no-resume",))
    if state == "finished":
        assert export(source, unfinished, *UNFINISHED).code == 0
        several = (("--overwrite",), ("--overwrite", "--dry-run"))
    for name, put in STRANGERS.items():
        put(unfinished / name)
        for options in several:
            refused(source, unfinished, name, *options)
        remove(unfinished / name)
    assert export(source, unfinished, *UNFINISHED, "--overwrite").code == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_unfinished_run_of_other_options_is_given_up_where_that_is_asked_for(
    source: Path, unfinished: Path, tmp_path: Path
) -> None:
    """The new run is then the one that goes on after a kill."""
    other, fresh = (*UNFINISHED, "--target", "paddlenlp"), tmp_path / "fresh"
    assert export(source, unfinished, *other).code == 8
    assert run_in_a_fork(partial(export, source, unfinished, *other, "--overwrite"), 60) == 9
    assert export(source, unfinished, *other).code == 0
    assert export(source, fresh, *other).code == 0
    assert tree(unfinished) == tree(fresh)


@pytest.mark.parametrize("journal", ["whole", "damaged"])
def test_what_an_unfinished_run_wrote_is_its_own(
    journal: str, source: Path, unfinished: Path
) -> None:
    """Temporary files too, and without a journal that can be read those of the same command."""
    shard = next(unfinished.glob("main/model-*"))
    shard.rename(temporary_path(shard))
    temporary_path(unfinished / "mtp_export.json").write_bytes(b"half")
    if journal == "damaged":
        (unfinished / JOURNAL_NAME).write_bytes(b"nothing\n")
    assert export(source, unfinished, *UNFINISHED, "--no-resume").code == 0
    assert not list(unfinished.rglob(".*"))


def test_the_files_of_another_command_are_known_by_its_journal(
    source: Path, unfinished: Path, output: Path
) -> None:
    other = ("--max-shard-size", "1GB", "--link", "copy", "--part", "mtp", "--quiet")
    assert export(source, unfinished, *other, "--no-resume").code == 0
    assert not (output / "main").exists()
    assert len(list(output.glob("mtp/*.safetensors"))) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_replaced_bundle_is_known_after_a_kill(source: Path, output: Path) -> None:
    """Its manifest is gone by then."""
    replacing = partial(export, source, output, *UNFINISHED, "--part", "mtp", "--overwrite")
    assert export(source, output, *UNFINISHED).code == 0
    number = 20
    while (output / "mtp_export.json").exists():
        assert run_in_a_fork(replacing, number) == 9
        number += 1
    assert (output / "main").exists()
    assert replacing().code == 0
    assert not (output / "main").exists()


DAMAGES: list[Callable[[Path], object]] = [
    lambda manifest: edit_json(manifest, lambda value: value["parts"]["main"].pop("files")),
    lambda manifest: edit_json(manifest, lambda value: value.update(parts=3)),
    lambda manifest: edit_json(manifest, lambda value: value.update(format_version=9)),
    lambda manifest: manifest.write_text("{"),
]


def test_a_damaged_manifest_lists_nothing(source: Path, output: Path) -> None:
    assert export(source, output, *UNFINISHED).code == 0
    for damage in DAMAGES:
        damage(output / "mtp_export.json")
        refused(source, output, "main", "--overwrite")


def test_a_manifest_s_paths_lead_nowhere_else(source: Path, output: Path) -> None:
    victim = output.with_name("thesis.txt")
    victim.write_text("years of work")
    assert export(source, output, *UNFINISHED).code == 0

    def add(manifest: dict[str, dict[str, dict[str, dict[str, object]]]]) -> None:
        files = manifest["parts"]["main"]["files"]
        names = ("../../thesis.txt", str(victim), "../mtp_export.json", "")
        files |= dict.fromkeys(names, files["config.json"])

    edit_json(output / "mtp_export.json", add)
    assert export(source, output, *UNFINISHED, "--overwrite").code == 0
    assert victim.read_text() == "years of work"


def test_a_part_that_is_a_file(source: Path, output: Path) -> None:
    assert export(source, output, *UNFINISHED, "--part", "mtp").code == 0
    (output / "main").write_text("years of work")
    refused(source, output, "main", "--overwrite")
    assert json.loads((output / "mtp_export.json").read_text())
