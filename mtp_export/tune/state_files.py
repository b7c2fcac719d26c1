"""Files of tensors that a run resumes from: each whole or not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from mtp_export.checkpoint.files import make_folder, write_whole
from mtp_export.errors import InvalidInputError, IoError

# Of torch's reader, and of who takes a state apart that is whole but of another kind.
_DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)


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


@contextmanager
def reading(path: Path, *, mapped: bool = False) -> Iterator[dict[str, Any]]:
    """Read a state for the block, which takes it apart; mapped: tensors are read when they are
    used.

    Raises InvalidInputError for a damaged file, or one that does not hold what the block takes.
    """
    try:
        yield torch.load(path, weights_only=True, mmap=mapped)
    except (*_DAMAGE, UnpicklingError) as error:
        raise InvalidInputError(
            "A file of the work folder is damaged",
            where=path,
            found=f"{type(error).__name__}: {str(error)[:200]}",
            todo="Remove it, and run the same command again",
        ) from error
