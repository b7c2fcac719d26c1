"""Checks before the first byte is written: disk, memory, and an output folder to use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from mtp_checkpoints.errors import OutputExistsError, ResourceError, UsageError
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_export.bundle.journal import JOURNAL_NAME
from mtp_export.bundle.links import existing_parent
from mtp_export.bundle.options import RunOptions
from mtp_export.bundle.own_files import (
    PARTS,
    SHARES_NAME,
    check_own,
    foreign_files,
    is_left_over,
    manifest_files,
)
from mtp_export.bundle.owner import OWNER_NAME

# Beside the parts, while a run is unfinished and then.
_FOLDERS = (DOWNLOADS_NAME, SHARES_NAME)
_FILES = (MANIFEST_NAME, JOURNAL_NAME)
# Indexes, configs, tokenizers, the manifest and the file system's own needs.
_SPARE_DISK_BYTES = 128_000_000


def check_nesting(source: Place, output: Path) -> None:
    """Refuse an output inside a local input and the reverse (UsageError)."""
    if not isinstance(source, Path):
        return
    inside, outside = (Path(os.path.realpath(path)) for path in (source, output))
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise UsageError(
            "Input and output folders must not contain each other",
            expected="two separate folders",
            found=f"input {inside}, output {outside}",
            todo="Choose another --output-dir",
        )


def needed_disk_bytes(written_bytes: int) -> int:
    """Return the disk space that a run needs to write a number of tensor bytes."""
    return written_bytes + _SPARE_DISK_BYTES


def check_disk(output: Path, written_bytes: int) -> None:
    """Refuse to start when the output's file system lacks space (ResourceError).

    What an earlier run left in the output counts as free: it is kept or replaced.
    """
    free = shutil.disk_usage(existing_parent(output)).free + _reusable_bytes(output)
    needed = needed_disk_bytes(written_bytes)
    if free < needed:
        raise ResourceError(
            "There is not enough disk space for the output",
            where=output,
            expected=f"{needed} bytes free ({needed / 1e9:.1f} GB)",
            found=f"{free} bytes ({free / 1e9:.1f} GB)",
            todo="Nothing was written. Free some space or choose another --output-dir",
        )


def _reusable_bytes(output: Path) -> int:
    folders = (*PARTS, DOWNLOADS_NAME)
    total = 0
    for path in (path for folder in folders for path in (output / folder).glob("*")):
        with suppress(FileNotFoundError):  # another share has just given it its name
            stat = path.stat()
            total += stat.st_blocks * 512 if stat.st_nlink == 1 else 0
    return total


def check_memory(limit_bytes: int, needed_bytes: int) -> None:
    """Refuse to start when the run needs more memory than is allowed or free (ResourceError)."""
    limits = {"--max-memory": limit_bytes, **_system_limits()}
    for name, have in limits.items():
        if have < needed_bytes:
            raise ResourceError(
                "There is not enough memory for this run",
                expected=f"{name} of at least {needed_bytes} bytes ({needed_bytes / 1e6:.0f} MB)",
                found=f"{have} bytes ({have / 1e6:.0f} MB)",
                todo="Nothing was written. Raise --max-memory or lower --workers",
            )


def _system_limits() -> dict[str, int]:
    """Return available memory and the container's limit, where Linux reports them."""
    limits: dict[str, int] = {}
    for name, path in (
        ("available memory", "/proc/meminfo"),
        ("a container limit", "/sys/fs/cgroup/memory.max"),
    ):
        try:
            words = Path(path).read_text().split()
        except OSError:
            continue
        if "MemAvailable:" in words:
            limits[name] = int(words[words.index("MemAvailable:") + 1]) * 1024
        elif len(words) == 1 and words[0].isdigit():
            limits[name] = int(words[0])
    return limits


def check_output(output: Path, run: RunOptions) -> None:
    """Refuse an output folder that holds something this run must not touch (OutputExistsError).

    Usable are a missing or empty folder and that of an unfinished run (it has a journal; for a
    share, other shares), and with overwrite also a finished bundle that nobody put other files
    into.
    """
    if not output.is_dir():
        if os.path.lexists(output):
            raise OutputExistsError(
                "The output is not a folder", where=output, todo="Choose another --output-dir"
            )
        return
    names = {path.name for path in output.iterdir() if not is_left_over(path.name)} - {OWNER_NAME}
    _check_kind(output, names, run)
    folders = [output / name for name in (*PARTS, *_FOLDERS) if name in names]
    others = [path.name for path in folders if path.is_symlink() or not path.is_dir()]
    foreign = others or sorted(names - {*PARTS, *_FOLDERS, *_FILES})
    if foreign or (names and not names & {MANIFEST_NAME, JOURNAL_NAME, SHARES_NAME}):
        raise foreign_files(output, foreign or sorted(names), "a new or empty folder")
    if is_finished(output):
        if not run.overwrite:
            raise finished_bundle(output)
        check_own(output, manifest_files(output))


def finished_bundle(output: Path) -> OutputExistsError:
    """Return the error of an output folder that holds a bundle already."""
    return OutputExistsError(
        "The output folder already holds a finished bundle",
        where=output,
        todo="Pass --overwrite to replace it, or choose another --output-dir",
    )


def _check_kind(output: Path, names: Set[str], run: RunOptions) -> None:
    """Refuse a whole run where shares are unfinished, and the reverse (OutputExistsError)."""
    if run.share is None and SHARES_NAME in names:
        raise OutputExistsError(
            "The output folder holds shares of an unfinished bundle",
            where=output,
            expected="--share, as they had it",
            todo=f"Run those that are missing, and mtp-export finish {output}; or choose another"
            " --output-dir",
        )
    if run.share is not None and JOURNAL_NAME in names:
        raise OutputExistsError(
            "The output folder holds an unfinished run that was not divided into shares",
            where=output,
            found="--share",
            todo="Run the earlier command again to finish it, or choose another --output-dir",
        )


def is_finished(output: Path) -> bool:
    """Return whether a folder holds a bundle, and no run that is still to be finished."""
    journal = output / JOURNAL_NAME
    unfinished = journal.exists() and journal.stat().st_size > 0
    shared = (output / SHARES_NAME).is_dir()
    return (output / MANIFEST_NAME).exists() and not (unfinished or shared)
