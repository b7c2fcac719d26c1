"""Disk space is compared before the first byte, to the byte."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from cases import export
from mtp_checkpoints.errors import OutputExistsError, ResourceError
from mtp_checkpoints.sources.byte_source import Address
from mtp_checkpoints.sources.files import temporary_path
from mtp_export.bundle.options import RunOptions, Share
from mtp_export.bundle.preflight import check_disk, needed_disk_bytes
from mtp_export.bundle.run_folder import check_output, is_finished
from mtp_export.paths import refuse_overlaps

Usage = namedtuple("Usage", ["total", "used", "free"])
WRITTEN = 1_000_000
WHOLE_RUN, SHARE = RunOptions(), RunOptions(share=Share(1, 2))


def have_free(free: int, patch: pytest.MonkeyPatch) -> None:
    def disk_usage(path: Path) -> Usage:
        assert path.is_dir()
        return Usage(1 << 40, 0, free)

    patch.setattr(shutil, "disk_usage", disk_usage)


@pytest.mark.parametrize(
    ("free", "fits"),
    [
        (0, False),
        (1, False),
        (needed_disk_bytes(WRITTEN) - 1, False),
        (needed_disk_bytes(WRITTEN), True),
    ],
)
def test_the_last_byte_counts(
    free: int, fits: bool, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_free(free, monkeypatch)
    if fits:
        check_disk(output, WRITTEN)
    else:
        with pytest.raises(ResourceError, match=f"{free} bytes"):
            check_disk(output, WRITTEN)


def test_a_full_disk_is_refused_before_anything_is_written(
    pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_free(0, monkeypatch)
    outcome = export(pristine, output)
    assert (outcome.code, "Nothing was written" in outcome.err) == (5, True)
    assert not output.exists()


def test_what_an_earlier_run_left_counts_as_free(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (output / "main").mkdir(parents=True)
    (output / "main/model.safetensors").write_bytes(bytes(WRITTEN))
    have_free(needed_disk_bytes(WRITTEN) - WRITTEN, monkeypatch)
    check_disk(output, WRITTEN)
    with pytest.raises(ResourceError):
        check_disk(output, 2 * WRITTEN)


def test_every_block_of_its_own_counts_and_no_other(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all parts and of downloads; not what is another name of the source's file, and
    not what has just been given another name by somebody else."""
    blocks = 0
    for number, name in enumerate(("main", "mtp", "eagle3", ".mtp_export.downloads"), 1):
        for file in ("a", "b"):
            path = output / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(number * 5000))
            blocks += path.stat().st_blocks
    (output / "main/gone").symlink_to("nowhere")
    source = output.with_name("source")
    source.write_bytes(bytes(70_000))
    (output / "main/linked").hardlink_to(source)
    (output / "notes").mkdir()
    (output / "notes/today").write_bytes(bytes(70_000))
    assert blocks > 0
    have_free(needed_disk_bytes(WRITTEN) - 512 * blocks, monkeypatch)
    check_disk(output, WRITTEN)
    with pytest.raises(ResourceError):
        check_disk(output, WRITTEN + 1)


def test_the_disk_of_the_nearest_folder_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Path]()

    def disk_usage(path: Path) -> Usage:
        asked.append(path)
        return Usage(1 << 40, 0, 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    check_disk(tmp_path / "a/b", 1)
    (tmp_path / "a").mkdir()
    check_disk(tmp_path / "a", 1)
    assert asked == [tmp_path, tmp_path / "a"]


def test_a_remote_source_has_no_folder_to_be_in(tmp_path: Path) -> None:
    refuse_overlaps({"--input-dir": Address("hf://acme/tiny")}, {"--output-dir": tmp_path})


@pytest.mark.parametrize("target", ["nowhere", "file"])
def test_an_output_that_is_a_link_to_no_folder(target: str, output: Path) -> None:
    output.with_name("file").touch()
    output.symlink_to(output.with_name(target))
    assert refusal(output, WHOLE_RUN).what == "The output is not a folder"
    output.unlink()
    check_output(output, WHOLE_RUN)


def test_what_killed_runs_leave_beside_the_parts_is_no_stranger_s(output: Path) -> None:
    output.mkdir()
    for name in ("mtp_export.json", ".mtp_export.journal", ".mtp_export.shares"):
        temporary_path(output / name).touch()
    (output / ".mtp-export-probe-x").mkdir()
    (output / ".mtp_export.owner").touch()
    for run in (WHOLE_RUN, SHARE):
        check_output(output, run)
    (output / ".mtp_export.other").touch()
    error = refusal(output, WHOLE_RUN)
    assert (error.found, error.expected) == (".mtp_export.other", "a new or empty folder")


def test_a_finished_bundle_is_replaced_if_all_in_it_is_its_own(output: Path) -> None:
    output.mkdir()
    (output / "mtp_export.json").write_text("{}")
    overwrite = RunOptions(overwrite=True)
    check_output(output, overwrite)
    error = refusal(output, WHOLE_RUN)
    assert error.todo == "Pass --overwrite to replace it, or choose another --output-dir"
    (output / "main").mkdir()
    (output / "main/b").touch()
    error = refusal(output, overwrite)
    assert (error.found, error.expected) == (
        "main/b, main",
        "only what its manifest or journal lists",
    )
    for name in ("a", "c", "d"):
        (output / "main" / name).touch()
    assert str(refusal(output, overwrite).found).count(",") == 2
    assert "not even with --overwrite" in str(error.todo)


def refusal(output: Path, run: RunOptions) -> OutputExistsError:
    with pytest.raises(OutputExistsError) as caught:
        check_output(output, run)
    assert caught.value.where == output and caught.value.todo
    return caught.value


def test_shares_are_not_mixed_with_whole_runs(output: Path) -> None:
    output.mkdir()
    for run in (WHOLE_RUN, SHARE):
        check_output(output, run)
    journal, shares = output / ".mtp_export.journal", output / ".mtp_export.shares"
    journal.touch()
    check_output(output, WHOLE_RUN)
    error = refusal(output, SHARE)
    words = "The output folder holds an unfinished run that was not divided into shares"
    assert (error.what, error.found) == (words, "--share")
    journal.unlink()
    shares.mkdir()
    check_output(output, SHARE)
    error = refusal(output, WHOLE_RUN)
    assert error.what == "The output folder holds shares of an unfinished bundle"
    assert error.expected == "--share, as they had it"
    assert f"mtp-export finish {output}" in str(error.todo)


def test_a_finished_bundle_has_neither_journal_nor_shares(output: Path) -> None:
    output.mkdir()
    assert not is_finished(output)
    (output / "mtp_export.json").write_text("{}")
    journal, shares = output / ".mtp_export.journal", output / ".mtp_export.shares"
    journal.touch()  # as a run makes it before it knows what is there
    assert is_finished(output)
    assert refusal(output, WHOLE_RUN).what == "The output folder already holds a finished bundle"
    journal.write_text("x")
    assert not is_finished(output)
    journal.unlink()
    shares.mkdir()
    assert not is_finished(output)


@pytest.mark.parametrize("name", ["main", ".mtp_export.shares", ".mtp_export.downloads"])
def test_a_folder_of_a_bundle_that_is_none(name: str, output: Path) -> None:
    output.mkdir()
    (output / ".mtp_export.journal").touch()
    (output / name).touch()
    run = SHARE if "shares" in name else WHOLE_RUN
    if run is SHARE:
        (output / ".mtp_export.journal").unlink()
    assert refusal(output, run).found == name
    (output / name).unlink()
    (output / name).symlink_to(output.parent)
    assert refusal(output, run).found == name
