"""Halves of main layers, attention and feed-forward, beside what the layers after them add: a good
one leans towards that, or makes the text likelier by itself. One that does neither is suspected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtp_export.verify.evidence.plain_text import PlainTexts
from mtp_runtime.cache import CacheSpec, LayerCache
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.execution import Head
from mtp_runtime.teacher_forcing import token_scores

ATTENTION, FEED_FORWARD = "attention", "feed_forward"
# Every so many rows are kept: a divisor of the rows of a chunk.
_STEP = 4
# What a half adds must be so large beside what all add, in half of the rows, to change tokens.
LEAST_SHARE = 0.05
# The mean cosine of what a half adds with what comes after it. 0.06 to 0.36 in the trained fixtures
# for nearly all that matter, -0.23 to 0.05 of one that is negated or in another order.
LEAST_LEANING = 0.05
# What leaving a half out of the last state alone costs the text where it is of use, in nats per
# token.
LEAST_USE = 0.005
MOST_SUSPECTS = 2
# Factors by which what a half of a layer adds is tried: one that does harm is better halved, too.
SIZES = (0.5, 2.0)


@dataclass(frozen=True)
class Suspect:
    """A half that leans to nothing: its layer, which half, and its mean cosine with what comes
    after it; 0 where nothing does."""

    layer: int
    half: str
    cosine: float


@dataclass
class AddedByHalves:
    """Outputs of each half of each layer, in some rows of texts that are taken through them."""

    added: dict[tuple[int, str], list[torch.Tensor]] = field(default_factory=dict)

    def watched(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer, which notes what its halves add."""
        halves: dict[str, Any] = {}
        for half in (ATTENTION, FEED_FORWARD):
            kept = self.added[number, half] = list[torch.Tensor]()
            halves[half] = _Noted(getattr(layer, half), kept)
        return replace(layer, **halves)

    @torch.inference_mode()
    def suspects(self, plain: PlainTexts, states: torch.Tensor, head: Head) -> list[Suspect]:
        """Return the halves that are suspected, the least leaning first. states [T, d]: of the
        texts, before the last norm."""
        added = self._outputs()
        total = sum(added.values(), torch.zeros_like(next(iter(added.values()))))
        rest, found = total.clone(), list[Suspect]()
        scored = _Scored.of(plain, states, head)
        for (layer, half), one in added.items():
            rest -= one
            if float((one.norm(dim=1) / total.norm(dim=1)).median()) < LEAST_SHARE:
                continue
            cosine = float(torch.cosine_similarity(one, rest, dim=1).mean())
            if cosine < LEAST_LEANING and scored.use_of(one) < LEAST_USE:
                found.append(Suspect(layer, half, cosine))
        return sorted(found, key=lambda one: one.cosine)[:MOST_SUSPECTS]

    def _outputs(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return what each half adds to the kept rows [n, d], float32."""
        return {half: torch.cat(parts).float() for half, parts in self.added.items()}


@dataclass(frozen=True)
class _Noted:
    """A half of a layer that keeps some rows of what it adds."""

    half: Any
    kept: list[torch.Tensor]

    def new_cache(self, spec: CacheSpec) -> LayerCache:
        """Make the cache that the attention keeps."""
        cache: LayerCache = self.half.new_cache(spec)
        return cache

    def __call__(self, x: torch.Tensor, *context: object) -> torch.Tensor:
        added: torch.Tensor = self.half(x, *context)
        self.kept.append(added[::_STEP])
        return added


@dataclass(frozen=True)
class _Scored:
    """Last states of the kept rows [n, d], those [m] that a token follows, and that token."""

    head: Head
    states: torch.Tensor
    rows: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def of(cls, plain: PlainTexts, states: torch.Tensor, head: Head) -> _Scored:
        """Keep the rows that the halves keep."""
        tokens, texts = plain.texts.tokens, plain.texts
        ends = torch.tensor([*texts.starts[1:], len(tokens)])
        kept = torch.arange(0, len(tokens), _STEP)
        rows = (~torch.isin(kept + 1, ends)).nonzero()[:, 0]
        return cls(head, states[::_STEP].float(), rows, tokens[kept[rows] + 1])

    def use_of(self, added: torch.Tensor) -> float:
        """The loss of the text without it in the last state, in nats per token."""
        own, without = (
            token_scores(self.head, self.head.normed(each[self.rows]), self.wanted)
            for each in (self.states, self.states - added)
        )
        return float((own - without).mean())
