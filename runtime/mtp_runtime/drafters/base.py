"""Interface of drafters: they see what the target computed, and propose tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.cache import PageAllocator
from mtp_runtime.config import EngineConfig
from mtp_runtime.models.eagle3 import Eagle3Module
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.model import Model, ModelCache
from mtp_runtime.models.parallel_heads import FfnHeads, LayerHeads
from mtp_runtime.request import Request


@dataclass(frozen=True)
class Pass:
    """Hidden states that the target computed for one request in a step, without rejected drafts.

    Rows [start, start + len(hidden)) of the request's tokens now have cache entries, and the token
    after each is in request.tokens. hidden [s, d] is what the MTP module takes of each, taps
    [s, taps * d] the inputs of the target's tapped layers, None where it has no taps.
    """

    request: Request
    start: int
    hidden: torch.Tensor
    taps: torch.Tensor | None = None


@dataclass(frozen=True)
class DrafterParts:
    """Parts that drafters may be built from: the target with the pages of its requests and its
    cache, and the draft model where a second checkpoint was given."""

    target: Model
    pages: PageAllocator
    cache: ModelCache
    config: EngineConfig
    draft_model: Model | None = None


class Drafter(Protocol):
    """Proposes tokens, drawn from the distribution that it reports, which may be any."""

    def observe(self, passes: Sequence[Pass]) -> None:
        """Take in what the target computed, before any call of propose for these requests."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Propose up to counts[i] tokens for requests[i], whose tokens are all committed."""

    def forget(self, request: Request) -> None:
        """Drop what is held for a request that ended or lost its cache."""


@dataclass(frozen=True)
class TargetDraft:
    """A draft that was read for one target: what builds its drafter, the weights, the number of
    tensors that they were made of, and the target's layers whose inputs they take."""

    build: Callable[[DrafterParts], Drafter]
    weights: Eagle3Module | FfnHeads | LayerHeads
    tensors: int
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class DrafterType:
    """A drafter of the registry, and what must be loaded for it: the MTP modules, a draft model.

    prefix_cache: it drafts for requests whose first tokens it never observed, and what it caches of
    a page depends on the tokens up to the one after that page. draws: its drafts come from a
    distribution, which has a temperature and an entropy. read: reads a draft that is no model
    of its own, from a folder of its own or from the bundle's folder of the method's name; build
    alone then says that there is none.
    """

    build: Callable[[DrafterParts], Drafter]
    needs_mtp: bool = False
    needs_draft_model: bool = False
    prefix_cache: bool = False
    draws: bool = True
    read: Callable[[Path, Loaded], TargetDraft] | None = None
