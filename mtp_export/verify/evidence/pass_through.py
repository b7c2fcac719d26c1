"""Drafter that passes every call to another: base of those that observe a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import Drafter, Pass
from mtp_runtime.request import Request


@dataclass
class PassThroughDrafter:
    """Pass every call to another drafter; a subclass overrides the calls that it observes."""

    inner: Drafter

    def observe(self, passes: Sequence[Pass]) -> None:
        """Pass on what the target computed."""
        self.inner.observe(passes)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Return the other drafter's proposals."""
        return self.inner.propose(requests, counts)

    def forget(self, request: Request) -> None:
        """Pass on that a request is forgotten."""
        self.inner.forget(request)
