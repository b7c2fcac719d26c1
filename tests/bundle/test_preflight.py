"""Disk space is compared before the first byte, to the byte."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from cases import export
from mtp_export.bundle.preflight import check_disk, needed_disk_bytes
from mtp_export.errors import ResourceError

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
