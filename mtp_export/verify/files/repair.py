"""The command that gives a checkpoint the MTP layer of the model that it was made from."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families import FAMILIES

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_CARD = "README.md"
# Blanks in few places: backtracking among them would take quadratic time.
_BASE_MODEL = re.compile(rb"^base_model:[ \t]*(?:\r?\n[ \t]*-[ \t]*)?[\"']?([\w.-]+/[\w.-]+)", re.M)
_UNKNOWN = "ORIGINAL"


def graft_command(context: Context) -> str:
    """Return the command, ready to run where the original is known; "" for a bundle, a draft alone,
    and models without a family."""
    main = context.main
    if context.is_bundle or main is None or str(main.config.get("model_type")) not in FAMILIES:
        return ""
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
