"""What a drafter is: it sees what the target computed, and proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mtp_runtime.acceptance import Draft
from mtp_runtime.cache import PagedCache
from mtp_runtime.config import EngineConfig
from mtp_runtime.models.deepseek_v3 import DeepseekV3
from mtp_runtime.request import Request


@dataclass(frozen=True)
class Pass:
    """What the target computed for one request in a step, rejected drafts already cut off.

    Rows [start, start + len(hidden)) of the request's tokens now have a cache entry, and the token
    after each is in request.tokens. hidden [s, d] is what the MTP module takes of each.
    """

    request: Request
    start: int
    hidden: torch.Tensor


@dataclass(frozen=True)
class DrafterParts:
    """What drafters may be built from; draft_model only where a second checkpoint was given."""

    target: DeepseekV3
    cache: PagedCache
    config: EngineConfig
    draft_model: DeepseekV3 | None = None


class Drafter(Protocol):
    """Proposes tokens. It must draw from the law it reports, and may be as wrong as it likes."""

    def observe(self, passes: Sequence[Pass]) -> None:
        """Take in what the target computed, before any call of propose for these requests."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Up to counts[i] tokens for requests[i], whose tokens are all committed."""

    def forget(self, request: Request) -> None:
        """Drop what is held for a request that ended or lost its cache."""
