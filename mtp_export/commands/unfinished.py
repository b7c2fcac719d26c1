"""Refusal of bundles whose run has not ended, before a command reads any of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Place


def refuse_unfinished(places: Iterable[Place | None]) -> None:
    """Refuse folders that a run has not finished, with the command that goes on with it
    (InvalidInputError, IoError)."""
    from mtp_checkpoints.containers.base import CONFIG_NAME
    from mtp_checkpoints.tensors.manifest import MANIFEST_NAME

    for place in places:
        if not isinstance(place, Path) or not os.path.isdir(place):
            continue
        if any(os.path.lexists(place / name) for name in (MANIFEST_NAME, CONFIG_NAME)):
            continue
        from mtp_export.verify.files.repair import unfinished_run  # its imports take time

        found = unfinished_run(place)
        if found is not None:
            cause, command = found
            todo = "To finish it" if command else "Run the command that makes it"
            raise InvalidInputError(cause, todo=todo, command=command)
