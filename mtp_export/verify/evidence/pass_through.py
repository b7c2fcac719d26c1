"""A drafter that hands every call on to another: base of those that look on at a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import Drafter, Pass
from mtp_runtime.request import Request


@dataclass
class PassThroughDrafter:
    """Do what another drafter does; a subclass overrides the calls that it looks at."""

    inner: Drafter

    def observe(self, passes: Sequence[Pass]) -> None:
        """Hand on what the target computed."""
        self.inner.observe(passes)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Return the other drafter's proposals."""
        return self.inner.propose(requests, counts)

    def forget(self, request: Request) -> None:
        """Let the other drafter forget a request."""
        self.inner.forget(request)
