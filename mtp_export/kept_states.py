"""States that a command resumes from: files of tensors in its work folder."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources.files import write_all, write_whole
from mtp_export.progress import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "then run the same command again: it goes on where it stopped"


def keep_state(path: Path, state: Mapping[str, Any], what: str) -> None:
    """Write tensors, and what else torch.load reads, whole or not at all.

    Raises IoError, which begins with what cannot be done and says how much room that takes.
    """

    def write(fd: int) -> None:
        file = _File(fd)
        try:
            torch.save(state, cast(IO[bytes], file))
        except RuntimeError as error:  # torch's own words for what its file raised
            raise (file.error or error) from None

    try:
        write_whole(path, write)
    except IoError as error:
        cause = error.__cause__
        is_full = isinstance(cause, OSError) and cause.errno in _FULL
        told = _no_room(path, state, what) if is_full else _not_written(path, what, error)
        raise told from cause


def _no_room(path: Path, state: Mapping[str, Any], what: str) -> IoError:
    free = shutil.disk_usage(path.parent).free
    return IoError(
        what,
        where=path,
        expected=f"room for {format_bytes(_size_bytes(state))}, beside the state before it",
        found=f"a full disk, with {format_bytes(free)} free",
        todo=f"Free some space, or give a --workdir with more room, {_AGAIN}",
    )


def _not_written(path: Path, what: str, error: IoError) -> IoError:
    return IoError(
        what,
        where=path,
        found=error.found,
        todo=f"Check that its folder is there and may be written, {_AGAIN}",
    )


class _File:
    """File that torch.save writes to; error: the first that the disk had."""

    def __init__(self, fd: int) -> None:
        self.error: OSError | None = None
        self._fd = fd
        self._position = 0

    def write(self, data: memoryview) -> int:
        """Write all of some bytes behind those before; return their number."""
        try:
            write_all(self._fd, data, self._position)
        except OSError as error:
            self.error = self.error or error
            raise
        self._position += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: no byte is held back."""


def _size_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        inner = value
    return sum(map(_size_bytes, inner))
