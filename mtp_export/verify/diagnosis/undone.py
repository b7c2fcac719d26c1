"""Evidence of a failure: the changes that were undone to explain it, with what each gained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtp_export.verify.check import UNDONE
from mtp_export.verify.evidence.statistics import Estimate

# Of a hundred changes, those that a report shows.
MOST_UNDONE = 8


def undone(tried: Iterable[tuple[str, Estimate]]) -> dict[str, Any]:
    """Return the data of a failure: what was changed, in words that follow "when", and the gain in
    nats per token, best first."""
    best = sorted(tried, key=lambda pair: -pair[1].value)[:MOST_UNDONE]
    return {UNDONE: [{"change": change, "gain": gain.as_json()} for change, gain in best]}
