"""The command that gives a checkpoint the MTP layer of the model that it was made from."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError, UnsupportedError
from mtp_checkpoints.families import FAMILIES
from mtp_checkpoints.quantization.methods import quant_config_of
from mtp_checkpoints.quantization.native import quantization_of
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_export.verify.check import MTP_MODULE, Item, Status

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_CARD = "README.md"
# Blanks in few places: backtracking among them would take quadratic time.
_BASE_MODEL = re.compile(rb"^base_model:[ \t]*(?:\r?\n[ \t]*-[ \t]*)?[\"']?([\w.-]+/[\w.-]+)", re.M)
_UNKNOWN = "ORIGINAL"


def with_repair(context: Context, item: Item) -> Item:
    """An item with the graft as its repair where it fails for a tensor of the MTP module, or for
    the module as a whole, and has none of its own."""
    if item.status is not Status.FAIL or item.repair or not item.subject:
        return item
    if item.subject != MTP_MODULE and item.subject not in _mtp_names(context):
        return item
    return replace(item, repair=graft_command(context))


def _mtp_names(context: Context) -> Collection[str]:
    """Names of the MTP part's tensors: of those that are there, and of a known family's."""
    part = context.part(MTP)
    if context.is_bundle or part is None or part.checkpoint is None:
        return ()
    tensors = part.checkpoint.tensors
    try:
        stored = context.layout(part).stored
    except MtpExportError:  # config_match says why
        return tensors.keys()
    copies = {pair.mtp_name for pair in stored.family.shared}
    # The original's is no larger or smaller: engines take the main model's.
    resized = {
        name
        for name in copies & tensors.keys() & stored.tensors.keys()
        if tensors[name].shape != stored.tensors[name].shape
    }
    return {*tensors, *stored.tensors} - resized


def graft_command(context: Context) -> str:
    """Return the command, ready to run where the original is known; "" for a bundle, a draft alone,
    and models or quantizations that a graft does not read."""
    main = context.main
    if context.is_bundle or main is None or str(main.config.get("model_type")) not in FAMILIES:
        return ""
    try:
        quant_config_of(quantization_of(main.config))
    except UnsupportedError:
        return ""
    except MtpExportError:  # a field of it is unusable: graft says which
        pass
    source = context.options.source
    original = _original(context) if source is None else quote(str(source))
    here = quote(str(context.options.bundle))
    replacing = " --replace" if context.mtp is not None and context.options.mtp is None else ""
    return f"mtp-export graft --main {here} --mtp {original} --output-dir BUNDLE{replacing}"


def _original(context: Context) -> str:
    """Return the address of the checkpoint that a model card names as the one it was made from."""
    if _CARD in context.files.names():
        try:
            named = _BASE_MODEL.search(context.files.read(_CARD))
        except MtpExportError:  # a card that cannot be read says nothing
            named = None
        if named is not None:
            return f"hf://{named[1].decode()}"
    return _UNKNOWN
