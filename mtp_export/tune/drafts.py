"""Drafts that are trained, by the name that --draft takes. A new one is one file, with its DRAFT,
and one line; reading this registry needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_export.tune.draft import DraftType

DRAFTS = {
    "mtp": "mtp_export.tune.mtp",
    "eagle3": "mtp_export.tune.eagle3",
    "parallel_heads": "mtp_export.tune.parallel_heads",
}


def draft_type(name: str) -> DraftType:
    """Return a key of DRAFTS' kind of draft."""
    draft: DraftType = import_module(DRAFTS[name]).DRAFT
    return draft
