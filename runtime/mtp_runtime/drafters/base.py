"""Interface of drafters: they see what the target computed, and propose tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from mtp_runtime.acceptance.base import Draft
    from mtp_runtime.cache import PageAllocator
    from mtp_runtime.config import EngineConfig
    from mtp_runtime.memory import Cached
    from mtp_runtime.models.load import Loaded
    from mtp_runtime.models.model import Model, ModelCache
    from mtp_runtime.request import Request
    from mtp_runtime.teacher_forcing import Anchors, Texts


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
        return

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Propose up to counts[i] tokens for requests[i], whose tokens are all committed."""
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        """Drop what is held for a request that ended or lost its cache."""
        return


class ForcedTexts(Protocol):
    """Texts with what their target computes of them, which drafts are scored on."""

    @property
    def model(self) -> Model:
        """The target."""

    @property
    def texts(self) -> Texts:
        """The texts, T rows in all."""

    @property
    def everywhere(self) -> Anchors:
        """The A rows that drafts start from."""

    @property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, d] before and after the last norm."""

    @property
    def choices(self) -> torch.Tensor:
        """The target's best token [T] after every row."""


@dataclass(frozen=True)
class ScoredVariant:
    """A draft without one known bug, scored beside the draft as it is.

    change: the difference, in words that follow "when". cause: what is wrong with a draft whose
    variant drafts better. scores, before: log-probabilities [A] of the target's best tokens at
    every anchor, of the variant and of the draft as it is. depth: of the last token scored, from 1.
    hit, hit_before [A]: where those tokens are drafted, if that was found out too. by_acceptance:
    it makes drafts more or less certain too, so that only more accepted ones speak for it. where
    [A]: the anchors that it was scored at, None for all.
    """

    name: str
    change: str
    cause: str
    scores: torch.Tensor
    before: torch.Tensor
    depth: int = 1
    hit: torch.Tensor | None = None
    hit_before: torch.Tensor | None = None
    by_acceptance: bool = False
    where: torch.Tensor | None = None


def _no_variants(texts: ForcedTexts) -> Iterator[ScoredVariant]:
    return iter(())


@dataclass(frozen=True)
class TargetDraft:
    """A draft that was read for one target: what builds its drafter, the weights, the number of
    tensors that they were made of, the target's layers whose inputs they take, and its variants
    without one known bug each, for who looks for the cause of a low acceptance."""

    build: Callable[[DrafterParts], Drafter]
    weights: Cached
    tensors: int
    taps: tuple[int, ...] = ()
    variants: Callable[[ForcedTexts], Iterator[ScoredVariant]] = _no_variants


@dataclass(frozen=True)
class DrafterType:
    """A drafter of the registry, and what must be loaded for it: the MTP modules, a draft model.

    prefix_cache: it drafts for requests whose first tokens it never observed, and what it caches of
    a page depends on the tokens up to the one after that page. draws: its drafts come from a
    distribution, which has a temperature and an entropy. read: reads a draft that is no model
    of its own, from a folder of its own or from the bundle's folder of the method's name; build
    alone then says that there is none. toy: builds a drafter whose weights are those of the
    target's first MTP module, so that a test can enumerate its output without a folder.
    """

    build: Callable[[DrafterParts], Drafter]
    needs_mtp: bool = False
    needs_draft_model: bool = False
    prefix_cache: bool = False
    draws: bool = True
    read: Callable[[Path, Loaded], TargetDraft] | None = None
    toy: Callable[[DrafterParts], Drafter] | None = None
