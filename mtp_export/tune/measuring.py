"""Acceptance of a draft on held-out texts, as an engine would see it while it writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_export.tune.draft import TrainedDraft
from mtp_export.tune.rows import Rows
from mtp_export.verify.evidence.blocks import Blocks, walked
from mtp_runtime.config import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class Measured:
    """Blocks of drafts by the number of drafts of a step."""

    blocks: Mapping[int, Blocks]

    @classmethod
    def of(cls, draft: TrainedDraft, rows: Rows) -> Measured:
        """Measure every number of drafts that the draft can make."""
        drafts, anchors = draft.judged(rows, MAX_DRAFT_TOKENS), rows.texts.anchors()
        ks = range(1, len(drafts.hit) + 1)
        return cls({k: walked(rows.texts, anchors, drafts=drafts, k=k) for k in ks})

    def as_json(self) -> dict[str, Any]:
        """Return the estimates with their intervals; None where nothing was drafted."""
        return {
            f"k={k}": {
                "acceptance": [None if e is None else e.as_json() for e in blocks.conditional],
                "tokens_per_step": None if (e := blocks.tokens_per_step) is None else e.as_json(),
            }
            for k, blocks in self.blocks.items()
        }
