"""Folder in which one process keeps the state of a streamed pass, for a later one to go on from."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.files import make_folder, remove_temporaries

STATE_NAME = "state.pt"
CANNOT_KEEP = "The streamed pass cannot keep its state"
_LOCK_NAME = "lock"


@contextmanager
def pass_folder(workdir: Path | None, identity: str) -> Iterator[Path]:
    """Take the first folder of a pass's identity that no other process works in (IoError).

    A process that ends early leaves its folder with the state in it. One that finishes removes it.
    """
    parent = workdir or Path(tempfile.gettempdir())
    folder, lock = parent, None
    try:
        make_folder(parent)
        for number in count():
            folder = parent / f"mtp-export-stream-{identity}-{number}"
            if (lock := _lock(folder)) is not None:
                break
    except (IoError, OSError) as error:
        raise IoError(
            CANNOT_KEEP,
            where=folder,
            found=getattr(error, "found", error),
            todo="Give a --workdir with room for the activations",
        ) from error
    assert lock is not None, "there is always another number"
    try:
        yield folder
        _remove(folder)
    finally:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Make and lock a folder; None where another process, or another user, has it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    lock = None
    try:
        if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
            return None
        path = folder / _LOCK_NAME
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == path.lstat().st_ino:
            taken, lock = lock, None
            return taken
    except (BlockingIOError, FileNotFoundError):  # in use, or just finished
        pass
    finally:
        if lock is not None:
            os.close(lock)
    return None


def _remove(folder: Path) -> None:
    """Remove the folder of a finished pass, the lock last; what is in the way is left."""
    with suppress(IoError, OSError):
        remove_temporaries(folder / STATE_NAME)
        (folder / STATE_NAME).unlink(missing_ok=True)
        (folder / _LOCK_NAME).unlink(missing_ok=True)
        folder.rmdir()
