"""Files that are written whole or not at all and survive a power cut; limits of what is read whole;
the errors of files that cannot be read or written."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mtp_checkpoints.errors import IT_GOES_ON, InvalidInputError, IoError
from mtp_checkpoints.sources.byte_source import Place

# Limits of the files that are read whole: some times the largest of any release, and what is parsed
# in seconds and in less than 1 GB.
_LIMITS_BYTES: tuple[tuple[str, int], ...] = (
    ("config.json", 16_000_000),
    ("*.index.json", 64_000_000),  # DeepSeek-V3 has 9 MB
    ("mtp_export.json", 128_000_000),  # as many entries as an index, with checksums
    ("*", 48_000_000),  # tokenizer.json of a large vocabulary has 34 MB
)


def check_small_file(path: Place, size_bytes: int) -> None:
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


# Flags of a new file: one that is written until it is whole. A link left in its place is refused.
NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


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
    if error.errno == errno.ENAMETOOLONG:
        return IoError(
            "A file cannot be written",
            where=path,
            found=error.strerror,
            todo=f"Choose a shorter path: a file's name may have {MAX_NAME_BYTES} bytes",
        )
    return IoError(
        "The disk filled up while writing" if full else "A file cannot be written",
        where=path,
        found=error.strerror or str(error),
        todo=("Free some space" if full else "Check the folder's permissions and the disk")
        + f", then run the same command again{IT_GOES_ON}",
    )


# Flags of a file that nobody else may have made.
EXCLUSIVE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TOKEN_BYTES = 6
# Of a file that is written: Linux takes 255 bytes, and its temporary name is longer.
MAX_NAME_BYTES = 255 - len("..") - 2 * _TOKEN_BYTES - len(".tmp")
_TEMPORARY = re.compile(rf"\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.(.+)\.tmp", re.DOTALL)


def temporary_path(path: Path) -> Path:
    """Return a new path at which a file is written until it is whole.

    Each attempt has its own: one that is taken for dead, on this machine or another, may still be
    writing. No engine's glob for shards matches it.
    """
    return path.with_name(f".{secrets.token_hex(_TOKEN_BYTES)}.{path.name}.tmp")


def name_when_whole(name: str) -> str | None:
    """Return the name that a temporary file gets when it is whole; None for any other file."""
    match = _TEMPORARY.fullmatch(name)
    return match and match[1]


def remove_temporaries(path: Path) -> None:
    """Remove what earlier attempts to write a file left (IoError)."""
    try:
        for entry in path.parent.iterdir():
            if name_when_whole(entry.name) == path.name:
                entry.unlink(missing_ok=True)
    except OSError as error:
        raise write_failure(path, error) from error


def write_all(fd: int, data: bytes | memoryview, position: int) -> None:
    """Write all of some bytes at a place in a file, however few each call takes."""
    left = memoryview(data)
    while len(left):
        count = os.pwrite(fd, left, position)
        left, position = left[count:], position + count


def write_whole(path: Path, write: Callable[[int], object]) -> None:
    """Make a file whole or not at all (IoError): write gets the descriptor of a temporary one,
    which is brought to disk before it gets its name."""
    temporary = temporary_path(path)
    try:
        fd = os.open(temporary, NEW_FILE, 0o666)
        try:
            write(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise write_failure(path, error) from error
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all (IoError)."""
    write_whole(path, lambda fd: write_all(fd, data, 0))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all (IoError)."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, if need be, so that they survive a power cut (IoError)."""
    try:
        missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
    except OSError as error:
        raise write_failure(folder, error) from error


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk, so that a rename survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
