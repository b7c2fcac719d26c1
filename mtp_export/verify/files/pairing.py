"""Main and draft as they were made together: the main model is the one that manifest and draft
record by its identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError, MtpExportError
from mtp_checkpoints.families.signs import main_layers, text_fields
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.manifest import MAIN_IDENTITY
from mtp_checkpoints.tensors.model_identity import model_identity, recorded_main_identity
from mtp_checkpoints.tensors.untied_head import with_head_like
from mtp_export.bundle.same_model import check_same_model, with_mtp_layers
from mtp_export.verify.check import Item, Problem, failed, not_tested, passed, verdict
from mtp_export.verify.diagnosis.causes import files as causes
from mtp_export.verify.evidence.parts import are_in_one_place

if TYPE_CHECKING:
    from mtp_checkpoints.tensors.reader import Checkpoint
    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import Part

_SHOWN = 16  # characters of an identity
_MAIN, _PAIR = "main: the model that was exported", "draft and main of one bundle"
_LAYERS = "num_hidden_layers"
_LEFT_OUT = "--no-checksums leaves it out"


def run(context: Context) -> Iterator[Item]:
    """The main model compared with what manifest and draft record of it, or named where it is
    not there."""
    draft = context.part("mtp")
    recorded = _recorded(draft)
    if context.main is None:
        if recorded is not None:
            yield not_tested(_PAIR, causes.main_elsewhere(recorded[:_SHOWN]))
    elif context.is_bundle:
        yield from _of_bundle(context, context.main, recorded)
    else:
        if context.options.mtp is not None and context.mtp and not context.other_config:
            of_draft = next((one for one in context.layouts if one.name == MTP), None)
            own_count = main_layers(context.mtp.config) == 1  # which is the draft's own layer
            fits = own_count and of_draft is not None and not of_draft.differences
            yield from _of_one_model(context.main, context.mtp, own_count=fits)
        if recorded is not None:
            yield _of_two_places(context, context.main, recorded)


def _recorded(draft: Part | None) -> str | None:
    """Return the identity that a draft on this machine records of its main model."""
    if draft is None or not isinstance(draft.place, Path):
        return None
    return recorded_main_identity(draft.place, draft.checkpoint.shards if draft.checkpoint else ())


def _of_bundle(context: Context, main: Checkpoint, recorded: str | None) -> Iterator[Item]:
    listed = (context.manifest or {}).get(MAIN_IDENTITY)
    if listed is None and recorded is None:
        why = "no identity of the main model is recorded: made by an earlier version, or apart"
        yield not_tested(_MAIN, why)
        return
    if not context.options.checksums:
        yield not_tested(_MAIN, _LEFT_OUT)
        return
    found = model_identity(main.written.values())
    if listed is None:
        yield not_tested(_MAIN, "no manifest records its identity")
    else:
        changed = [_changed(context)] if found != listed else []
        yield verdict(_MAIN, changed, found[:_SHOWN])
    if context.part("mtp") is None or are_in_one_place(context.parts):
        return
    if recorded is None:
        yield not_tested(_PAIR, "the draft records no main model")
        return
    wanted = listed or found  # a main model that changed is the item above
    words = causes.draft_of_another_main(recorded[:_SHOWN], wanted[:_SHOWN])
    yield verdict(_PAIR, [Problem("mtp", words)] if recorded != wanted else [], recorded[:_SHOWN])


def _changed(context: Context) -> Problem:
    """Return the problem of a main model that is not the recorded one, with a tensor as its subject
    where that one alone is damaged."""
    recorded = context.walks.checksums(MAIN)
    found = context.walks.of(MAIN).checksums if recorded else {}
    damaged = [name for name, checksum in recorded.items() if found.get(name) != checksum]
    return Problem(damaged[0] if len(damaged) == 1 else MAIN, causes.MAIN_REPLACED)


def _of_one_model(main: Checkpoint, draft: Checkpoint, *, own_count: bool) -> Iterator[Item]:
    """The draft that --mtp names has the sizes of the main model, and computes as it does.
    own_count: its config.json counts its own layer in place of the main ones."""
    name = "draft and main of one model"
    if own_count:
        layers = {_LAYERS: text_fields(main.config).get(_LAYERS)}
        draft = replace(draft, config={**draft.config, **layers})
    try:
        config = with_mtp_layers(main.config, draft.config)
        check_same_model(main, config, with_head_like(draft, main))
    except InvalidInputError as error:
        yield failed(name, str(error), subject=CONFIG_NAME)
    except MtpExportError:  # config_match says why one cannot be followed
        return
    else:
        yield passed(name)


def _of_two_places(context: Context, main: Checkpoint, recorded: str) -> Item:
    """A checkpoint's main model and the draft that --mtp names: another one may be a conversion of
    the same model, for which the draft is as good."""
    if not context.options.checksums:
        return not_tested(_PAIR, _LEFT_OUT)
    if not context.is_local:
        return not_tested(_PAIR, "nothing but headers is downloaded")
    found = model_identity(main.written.values())
    if found == recorded:
        return passed(_PAIR, figure=recorded[:_SHOWN])
    return not_tested(_PAIR, causes.draft_of_another_main(recorded[:_SHOWN], found[:_SHOWN]))
