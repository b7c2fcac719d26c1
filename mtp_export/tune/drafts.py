"""Drafts that are trained, by the name that --draft takes. A new one is one file and one line."""

from __future__ import annotations

from mtp_export.tune.draft import DraftType
from mtp_export.tune.eagle3 import EAGLE3
from mtp_export.tune.mtp import MTP
from mtp_export.tune.parallel_heads import PARALLEL_HEADS

DRAFTS: dict[str, DraftType] = {"mtp": MTP, "eagle3": EAGLE3, "parallel_heads": PARALLEL_HEADS}
