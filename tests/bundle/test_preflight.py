"""Disk space is compared before the first byte, to the byte."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from cases import export
from mtp_export.bundle.options import RunOptions, Share
from mtp_export.bundle.preflight import (
    check_disk,
    check_output,
    is_finished,
    needed_disk_bytes,
)
from mtp_export.errors import OutputExistsError, ResourceError

Usage = namedtuple("Usage", ["total", "used", "free"])
WRITTEN = 1_000_000


def have_free(free: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))


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


WHOLE_RUN, SHARE = RunOptions(), RunOptions(share=Share(1, 2))


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
