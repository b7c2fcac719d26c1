"""Files of tensors that a run resumes from: each whole or not there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from mtp_export.checkpoint.files import make_folder, write_whole
from mtp_export.errors import InvalidInputError, IoError


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state whole or not at all (IoError)."""

    def write(fd: int) -> None:
        with open(fd, "wb", closefd=False) as file:
            torch.save(dict(state), file)

    make_folder(path.parent)
    try:
        write_whole(path, write)
    except RuntimeError as error:  # of torch's writer, when the disk is full
        raise IoError(
            "A file of the work folder cannot be written",
            where=path,
            found=error,
            todo="Give a --workdir with more room, then run the same command again",
        ) from error


def load(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a state; mapped: tensors are read when they are used.

    Raises InvalidInputError for a damaged file.
    """
    try:
        state = torch.load(path, weights_only=True, mmap=mapped)
    except (EOFError, OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise InvalidInputError(
            "A file of the work folder is damaged",
            where=path,
            found=error,
            todo="Remove it, and run the same command again",
        ) from error
    assert isinstance(state, dict), "save wrote it"
    return state
