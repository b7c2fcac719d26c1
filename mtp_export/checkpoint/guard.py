"""What must hold before the first byte is written: room, memory, and an output folder to use."""

from __future__ import annotations

import shutil
from pathlib import Path

from mtp_export.checkpoint.journal import JOURNAL_NAME
from mtp_export.checkpoint.links import existing_parent
from mtp_export.checkpoint.manifest import MANIFEST_NAME
from mtp_export.errors import OutputExistsError, ResourceError, UsageError

# Indexes, configs, tokenizers, the manifest and the file system's own needs.
_SPARE_DISK_BYTES = 128_000_000


def check_nesting(source: Path, output: Path) -> None:
    """Refuse an output inside the input and the reverse (UsageError)."""
    inside, outside = source.resolve(), output.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise UsageError(
            "Input and output folders must not contain each other",
            expected="two separate folders",
            found=f"input {inside}, output {outside}",
            todo="Choose another --output-dir",
        )


def check_disk(output: Path, needed_bytes: int) -> None:
    """Refuse to start when the output's file system lacks room (ResourceError)."""
    free = shutil.disk_usage(existing_parent(output)).free
    needed = needed_bytes + _SPARE_DISK_BYTES
    if free < needed:
        raise ResourceError(
            "There is not enough disk space for the output",
            where=output,
            expected=f"{needed} bytes free ({needed / 1e9:.1f} GB)",
            found=f"{free} bytes ({free / 1e9:.1f} GB)",
            todo="Nothing was written. Free some space or choose another --output-dir",
        )


def check_memory(limit_bytes: int, needed_bytes: int) -> None:
    """Refuse to start when the run needs more memory than allowed or free (ResourceError)."""
    free = available_memory_bytes()
    for name, have in (("--max-memory", limit_bytes), ("available memory", free)):
        if have is not None and have < needed_bytes:
            raise ResourceError(
                "There is not enough memory for this run",
                expected=f"{name} of at least {needed_bytes} bytes ({needed_bytes / 1e6:.0f} MB)",
                found=f"{have} bytes ({have / 1e6:.0f} MB)",
                todo="Nothing was written. Raise --max-memory or lower --workers",
            )


def available_memory_bytes() -> int | None:
    """MemAvailable of Linux, None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output folder that holds something this run must not touch (OutputExistsError).

    Free to use: a missing or empty folder, and an unfinished run's (it has a journal). With
    overwrite also a finished bundle. Files that are not a bundle's are never removed.
    """
    if output.exists() and not output.is_dir():
        raise OutputExistsError("The output is a file", where=output, expected="a folder")
    names = {path.name for path in output.iterdir()} if output.exists() else set()
    ours = {"main", "mtp", MANIFEST_NAME, JOURNAL_NAME}
    foreign = sorted(names - ours)
    if foreign or (names and not names & {MANIFEST_NAME, JOURNAL_NAME}):
        raise OutputExistsError(
            "The output folder holds files that are no export of this tool",
            where=output,
            expected="a new or empty folder",
            found=", ".join((foreign or sorted(names))[:3]),
            todo="Choose another --output-dir; this tool does not remove them, not even with "
            "--overwrite",
        )
    if MANIFEST_NAME in names and JOURNAL_NAME not in names and not overwrite:
        raise OutputExistsError(
            "The output folder already holds a finished bundle",
            where=output,
            todo="Pass --overwrite to replace it, or choose another --output-dir",
        )


def clear_output(output: Path) -> None:
    """Remove what an earlier run left, its manifest first; the journal stays."""
    (output / MANIFEST_NAME).unlink(missing_ok=True)
    for part in ("main", "mtp"):
        if (output / part).exists():
            shutil.rmtree(output / part)


def clear_temporaries(folder: Path) -> None:
    """Remove the half-written files of a killed run."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
