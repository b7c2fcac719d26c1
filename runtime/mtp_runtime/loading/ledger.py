"""Account of what a loading did with every tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """Account of every tensor, by the name that it has (or would have) in the released layout.

    loaded: read into the model. skipped: stored but not needed for this run. tied: equal to
    another tensor, which is used in its place. Every stored tensor is in one of the three;
    expected are those that config.json promises.
    """

    expected: frozenset[str]
    loaded: frozenset[str]
    skipped: frozenset[str]
    tied: frozenset[str]
