"""Check `files`: the bundle's files agree with its manifest, its configs and each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.files.checksums import manifest_items
from mtp_export.verify.files.identity import identity_items
from mtp_export.verify.files.promises import promise_items

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


def run(context: Context) -> Iterator[Item]:
    """Headers and index, then manifest, then config against tensors, then part against part."""
    yield from _opened(context)
    yield from manifest_items(context)
    yield from promise_items(context)
    yield from identity_items(context)


def _opened(context: Context) -> Iterator[Item]:
    """A part that opens has whole headers and an index that agrees with them, both ways."""
    failures = {"manifest": context.manifest_error}
    failures |= {f"{part.name}: headers and index": part.error for part in context.parts}
    for name, error in failures.items():
        problems = [] if error is None else [Problem(str(error.where), str(error))]
        yield verdict(name, problems)
