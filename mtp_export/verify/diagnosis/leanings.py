"""Experts of a main model beside their siblings: what an expert adds to a row leans towards what
the other picked ones and the shared ones add to it. One with the wrong sign leans away from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from mtp_export.verify.diagnosis.scaled_variants import columns_scaled
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.moe import Experts, Mlp, Moe, expert_by_expert, sort_by_expert
from mtp_runtime.teacher_forcing import Texts

# The interval of a leaning that must be below zero.
CONFIDENCE = 0.99
# Of more experts that lean away from the others it is not the sign.
MOST_AWAY = 4


@dataclass(frozen=True)
class Leaning:
    """Mean cosine of what an expert adds to its rows with what all others add to them."""

    layer: int
    expert: int
    cosine: Estimate

    @property
    def is_away(self) -> bool:
        """True for an expert that leans away from the others by its interval."""
        return self.cosine.high is not None and self.cosine.high < 0


@dataclass
class Leanings:
    """Leanings of the experts of layers that texts are taken through."""

    texts: Texts
    found: list[Leaning] = field(default_factory=list)

    def watched(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer, whose experts are measured when it runs; a dense one as it is."""
        if not isinstance(layer.feed_forward, Moe):
            return layer
        return replace(layer, feed_forward=_Measured(layer.feed_forward, number, self))

    @property
    def away(self) -> list[Leaning]:
        """Experts that lean away from the others as far as their siblings lean towards each other,
        the farthest first; none where others lean away less far, or so many do that the model was
        trained so."""
        away = sorted((one for one in self.found if one.is_away), key=_cosine)
        return away if len(away) <= MOST_AWAY and all(map(self._stands_out, away)) else []

    def usual(self, layer: int) -> float:
        """The median of the leanings of a layer's experts."""
        return median(one.cosine.value for one in self.found if one.layer == layer)

    def _stands_out(self, one: Leaning) -> bool:
        return one.cosine.value < -self.usual(one.layer) / 2


def _cosine(one: Leaning) -> float:
    return one.cosine.value


@dataclass(frozen=True)
class _Measured:
    """A mixture of experts that notes the leaning of each when all rows of the texts go through."""

    moe: Moe
    number: int
    into: Leanings

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x [T, d] to [T, d]."""
        kept = _KeptExperts(self.moe.experts)
        total = replace(self.moe, experts=kept)(x)
        texts = self.into.texts
        sizes = torch.tensor([len(text.tokens) for text in texts.texts])
        owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        for expert, rows, own in kept.added:
            others = total[rows].float() - own
            cosines = torch.cosine_similarity(own, others, dim=1).cpu().double()
            sums = torch.zeros(len(sizes), dtype=torch.float64)
            mine = owners[rows.cpu()]
            sums.index_add_(0, mine, cosines)
            counts = torch.bincount(mine, minlength=len(sizes))
            cosine = ratio(sums.tolist(), counts.tolist(), CONFIDENCE)
            if cosine is not None:
                self.into.found.append(Leaning(self.number, expert, cosine))
        return total


@dataclass(frozen=True)
class _KeptExperts:
    """Experts that keep what each adds to its rows: the expert, the rows [n], and [n, d]."""

    experts: Experts
    added: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.experts)

    def each(self, numbers: Iterable[int]) -> Iterator[Mlp]:
        """Yield the experts of these numbers."""
        return self.experts.each(numbers)

    def every(self) -> Iterator[Mlp]:
        """Yield all of them."""
        return self.experts.every()

    def routed(self, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the picked experts' outputs [T, d], float32."""
        order = sort_by_expert(picked)
        sorted_weights = weights.flatten()[order.pairs, None]
        total = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        numbers = order.experts
        for number, expert, end in zip(numbers, self.each(numbers), order.ends, strict=True):
            rows = order.pairs[start:end] // picked.shape[1]
            own = expert(x[rows]).float() * sorted_weights[start:end]
            total.index_add_(0, rows, own)
            self.added.append((number, rows, own))
            start = end
        return total


@dataclass(frozen=True)
class _OneNegated:
    """Experts of which one has the other sign."""

    experts: Experts
    negated: int

    def __len__(self) -> int:
        return len(self.experts)

    def each(self, numbers: Iterable[int]) -> Iterator[Mlp]:
        """Yield the experts of these numbers."""
        wanted = list(numbers)
        for number, expert in zip(wanted, self.experts.each(wanted), strict=True):
            yield self._changed(number, expert)

    def every(self) -> Iterator[Mlp]:
        """Yield all of them."""
        return (self._changed(number, one) for number, one in enumerate(self.experts.every()))

    def routed(self, x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sums of the picked experts' outputs [T, d], float32."""
        return expert_by_expert(self, x, picked, weights)

    def _changed(self, number: int, expert: Mlp) -> Mlp:
        if number != self.negated:
            return expert
        return replace(expert, down=columns_scaled(expert.down, slice(None), -1.0))


@dataclass(frozen=True)
class Negated:
    """The layers of a model, with one expert of one of them negated."""

    layer: int
    expert: int

    def __call__(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer that runs in place of one, by its number."""
        moe = layer.feed_forward
        if number != self.layer or not isinstance(moe, Moe):
            return layer
        experts = _OneNegated(moe.experts, self.expert)
        return replace(layer, feed_forward=replace(moe, experts=experts))
