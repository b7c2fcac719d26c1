"""Atomic writes of small files, their size limits, and the errors of files that cannot be read or
written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mtp_export.errors import InvalidInputError, IoError

# Limits of the files that are read whole: some times the largest of any release, and what is parsed
# in seconds and in less than 1 GB.
_LIMITS_BYTES: tuple[tuple[str, int], ...] = (
    ("config.json", 16_000_000),
    ("*.index.json", 64_000_000),  # DeepSeek-V3 has 9 MB
    ("mtp_export.json", 128_000_000),  # as many entries as an index, with checksums
    ("*", 48_000_000),  # tokenizer.json of a large vocabulary has 34 MB
)


def check_small_file(path: Path, size_bytes: int) -> None:
    """Refuse a file that is too large to be what its name says (InvalidInputError)."""
    limit = next(limit for pattern, limit in _LIMITS_BYTES if fnmatch(path.name, pattern))
    if size_bytes > limit:
        raise InvalidInputError(
            "A file is too large for what it is",
            where=path,
            expected=f"at most {limit} bytes",
            found=f"{size_bytes} bytes",
            todo="Get the file again from the checkpoint's source",
        )


def read_failure(path: Path, error: OSError) -> IoError:
    """Return the error of a file that cannot be read."""
    return IoError(
        "A file cannot be read",
        where=path,
        found=error.strerror or str(error),
        todo="Check its permissions and the disk",
    )


def write_failure(path: Path, error: OSError) -> IoError:
    """Return the error of a file that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return IoError(
        "The disk filled up while writing" if full else "A file cannot be written",
        where=path,
        found=error.strerror or str(error),
        todo=("Free some space" if full else "Check the folder's permissions and the disk")
        + ", then run the same command again: it goes on where it stopped",
    )


def temporary_path(path: Path) -> Path:
    """Return the path at which a file is written until it is whole.

    No engine's glob for shards matches it.
    """
    return path.with_name(f".{path.name}.tmp")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all (IoError)."""
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_failure(path, error) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all (IoError)."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk, so that a rename survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
