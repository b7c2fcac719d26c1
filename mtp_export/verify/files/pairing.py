"""Main and draft as they were made together: the main model is the one that manifest and draft
record by its identity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtp_checkpoints.tensors.manifest import MAIN_IDENTITY
from mtp_checkpoints.tensors.model_identity import model_identity, recorded_main_identity
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import files as causes

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_SHOWN = 16  # characters of an identity


def run(context: Context) -> Iterator[Item]:
    """The main part of a bundle compared with what manifest and draft record of it."""
    if not context.is_bundle or context.main is None:
        return
    listed = (context.manifest or {}).get(MAIN_IDENTITY)
    draft = context.part("mtp")
    recorded = None if draft is None else recorded_main_identity(draft.folder)
    main, pair = "main: the model that was exported", "draft and main of one bundle"
    if listed is None and recorded is None:
        why = "no identity of the main model is recorded: made by an earlier version, or apart"
        yield not_tested(main, why)
        return
    if not context.options.checksums:
        yield not_tested(main, "--no-checksums leaves it out")
        return
    found = model_identity(context.main.tensors.values())
    if listed is None:
        yield not_tested(main, "no manifest records its identity")
    else:
        changed = [Problem("main", causes.MAIN_REPLACED)] if found != listed else []
        yield verdict(main, changed, found[:_SHOWN])
    if draft is None:
        return
    if recorded is None:
        yield not_tested(pair, "the draft records no main model")
        return
    wanted = listed or found  # a main model that changed is the item above
    words = causes.draft_of_another_main(recorded[:_SHOWN], wanted[:_SHOWN])
    yield verdict(pair, [Problem("mtp", words)] if recorded != wanted else [], recorded[:_SHOWN])
