"""Grouped-query attention to the last tokens alone.

Source: Beltagy et al., Longformer (arXiv 2004.05150), sliding windows; transformers' exaone_moe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_checkpoints.families.fields import Fields
from mtp_checkpoints.families.parts.gqa import Gqa

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class SlidingGqa(Gqa):
    """Grouped-query attention of a token to `window` tokens, itself and those before it."""

    window: int

    @classmethod
    def of(cls, fields: Fields) -> SlidingGqa:
        """Read a config.json (InvalidInputError for a missing or unusable size)."""
        whole = Gqa.of(fields)
        return cls(whole.hidden, whole.sizes, whole.rope, fields.whole("sliding_window"))


def sliding(
    fields: Fields, layers: int, usual: Sequence[bool] = (), *, key: str = "layer_types"
) -> Sequence[bool]:
    """Return which layers have a sliding window, by the field of a name or, where it is absent, as
    is usual: none by default (InvalidInputError for an unusable list)."""
    if not fields.has(key):
        return usual or [False] * layers
    return [kind == _SLIDING for kind in fields.kinds(key, (_SLIDING, _FULL), layers)]
