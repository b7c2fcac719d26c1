"""Manifest, headers and index as they were opened: whole, and headers and index agree both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError
from mtp_export.verify.check import Item, Problem, ended_by, verdict
from mtp_runtime.drafters import extra_drafts

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """The manifest and each part, with the error of one that could not be opened."""
    yield _item("manifest", context.manifest_error)
    listed = (context.manifest or {}).get("parts", {})
    drafts = (context.extra_draft_part(name) for name in extra_drafts() if name in listed)
    for part in (*context.parts, *filter(None, drafts)):
        yield _item(f"{part.name}: headers and index", part.error)


def _item(name: str, error: Exception | None) -> Item:
    if error is None:
        return verdict(name, [])
    if isinstance(error, MtpExportError):
        return verdict(name, [Problem(str(error.where), str(error))])
    return ended_by(error)
