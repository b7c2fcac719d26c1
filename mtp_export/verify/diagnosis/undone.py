"""Evidence of a failure: the changes that were undone to explain it, with what each gained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mtp_export.verify.check import UNDONE
from mtp_export.verify.evidence.statistics import Estimate

# Of a hundred changes, those that a report shows.
MOST_UNDONE = 8


def undone(
    tried: Iterable[tuple[str, Estimate]], named: Sequence[tuple[str, Estimate]] = ()
) -> dict[str, Any]:
    """Return the data of a failure: what was changed, in words that follow "when", and the gain in
    nats per token, best first; of a change that was tried on several texts the first.

    named: those by which the cause is named, which are shown however little they gain.
    """
    gains = dict(reversed([*named, *tried]))
    first = {change for change, _ in named}
    shown = sorted(gains.items(), key=lambda pair: (pair[0] not in first, -pair[1].value))
    best = sorted(shown[:MOST_UNDONE], key=lambda pair: -pair[1].value)
    return {UNDONE: [{"change": change, "gain": gain.as_json()} for change, gain in best]}
