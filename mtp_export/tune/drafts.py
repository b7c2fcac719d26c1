"""Drafts that are trained, by the name that --draft takes. A new one is one file, with its DRAFT,
and one line; reading this registry needs no torch."""

from __future__ import annotations

DRAFTS = {
    "mtp": "mtp_export.tune.mtp",
    "eagle3": "mtp_export.tune.eagle3",
    "parallel_heads": "mtp_export.tune.parallel_heads",
}
