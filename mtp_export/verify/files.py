"""Check 1: the files are what the manifest says, and tell engines what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_export.verify.base import Item, Status

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """Manifest and parts can be opened; more follows."""
    yield from _opened(context)


def _opened(context: Context) -> Iterator[Item]:
    """A part that opens has a whole header in each shard and an index that agrees with them."""
    if context.manifest_error is not None:
        yield Item("manifest", Status.FAIL, cause=str(context.manifest_error))
    else:
        yield Item("manifest", Status.PASS)
    for part in context.parts:
        name = f"{part.name}: headers and index"
        if part.error is not None:
            subject = str(part.error.where)
            yield Item(name, Status.FAIL, subject=subject, cause=str(part.error))
        else:
            yield Item(name, Status.PASS)
