"""Checks before the first byte is written: disk and memory."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from mtp_checkpoints.errors import ResourceError
from mtp_checkpoints.free_memory import free_memory
from mtp_checkpoints.sources.staging import DOWNLOADS_NAME
from mtp_export.bundle.links import existing_parent
from mtp_export.bundle.run_folder import PARTS

# Indexes, configs, tokenizers, the manifest and the file system's own needs.
_SPARE_DISK_BYTES = 128_000_000


def needed_disk_bytes(written_bytes: int) -> int:
    """Return the disk space that a run needs to write a number of tensor bytes."""
    return written_bytes + _SPARE_DISK_BYTES


def free_disk_bytes(output: Path) -> int:
    """Return the bytes that a run may write to an output's file system.

    What an earlier run left in the output counts as free: it is kept or replaced.
    """
    return shutil.disk_usage(existing_parent(output)).free + _reusable_bytes(output)


def check_disk(output: Path, written_bytes: int) -> None:
    """Refuse to start when the output's file system lacks space (ResourceError)."""
    free = free_disk_bytes(output)
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
    limits = {"--max-memory": limit_bytes, **free_memory()}
    for name, have in limits.items():
        if have < needed_bytes:
            raise ResourceError(
                "There is not enough memory for this run",
                expected=f"{name} of at least {needed_bytes} bytes ({needed_bytes / 1e6:.0f} MB)",
                found=f"{have} bytes ({have / 1e6:.0f} MB)",
                todo="Nothing was written. Raise --max-memory or lower --workers",
            )
