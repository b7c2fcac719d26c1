"""Plain decoding: no drafts."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.request import Request


class NoDrafter(Drafter):
    """Proposes nothing, so that every block has one token."""

    def __init__(self, parts: DrafterParts) -> None:
        return

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in requests]
