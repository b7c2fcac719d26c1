"""Atomic writes of small files, and the errors of files that cannot be read or written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtp_export.errors import IoError


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
