"""Files of tensors that a run resumes from: each whole or not there, with a checksum in it.

What was read of one is what a run saved, so nobody has to look whether it fits together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.files import make_folder
from mtp_export.kept_states import keep_state
from mtp_runtime.loading.draft_folder import UNREADABLE, unpickled

_CHECKSUM = "checksum"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state whole or not at all (IoError)."""
    make_folder(path.parent)
    checked = {**state, _CHECKSUM: _checksum(state)}
    keep_state(path, checked, "A file of the work folder cannot be written")


def load(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a state; mapped: tensors stay on disk, and are read when they are used.

    Raises InvalidInputError for a file that does not hold what was saved.
    """
    try:
        state = unpickled(path, mapped=mapped)
        recorded = state.pop(_CHECKSUM)
    except UNREADABLE as error:
        found = f"{type(error).__name__}: {str(error)[:200]}"
        raise _damaged(path, found) from error
    if recorded != _checksum(state):
        raise _damaged(path, "another checksum than its own")
    return dict(state)


def _damaged(path: Path, found: str) -> InvalidInputError:
    return InvalidInputError(
        "A file of the work folder is damaged",
        where=path,
        found=found,
        todo="Remove it, and run the same command again",
    )


def _checksum(state: Mapping[str, Any]) -> str:
    digest = xxhash.xxh3_128()
    for piece in _pieces(state):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    """Yield what a value consists of: the bytes of its tensors, all else by its representation."""
    if isinstance(value, torch.Tensor):
        yield repr((value.dtype, value.shape)).encode()
        plain: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(plain)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield repr(name).encode()
            yield from _pieces(inner)
    elif isinstance(value, list | tuple):
        yield repr(len(value)).encode()
        for inner in value:
            yield from _pieces(inner)
    else:
        yield repr(value).encode()
