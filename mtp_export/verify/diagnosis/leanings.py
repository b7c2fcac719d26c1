"""Experts of a main model beside their siblings: what an expert adds to a row leans towards what
the other picked ones and the shared ones add to it, and what the shared ones add towards the sum of
the routed ones. One with the wrong sign leans away from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from mtp_export.verify.diagnosis.changed_weight import columns_scaled
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
    """Mean cosine of what an expert adds to its rows with what all others add to them; of the
    shared ones together with what the routed ones add. experts: their numbers."""

    layer: int
    experts: range
    cosine: Estimate
    is_shared: bool = False

    @property
    def name(self) -> str:
        """The expert in words."""
        one = "the shared expert" if self.is_shared else f"expert {self.experts.start}"
        return f"{one} of layer {self.layer}"

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
        trained so. Routed ones of a layer whose shared one does lean away from that."""
        away = sorted((one for one in self.found if one.is_away), key=_cosine)
        layers = {one.layer for one in away if one.is_shared}
        away = [one for one in away if one.is_shared or one.layer not in layers]
        return away if len(away) <= MOST_AWAY and all(map(self._stands_out, away)) else []

    @property
    def weak(self) -> list[Leaning]:
        """Routed experts that lean half as far as is usual in their layer, or less far."""
        routed = (one for one in self.found if not one.is_shared)
        return [one for one in routed if one.cosine.value < self.usual(one) / 2]

    def usual(self, one: Leaning) -> float:
        """The median of the leanings of a layer's experts; of the shared ones, over all layers."""
        like = (other for other in self.found if other.is_shared == one.is_shared)
        return median(o.cosine.value for o in like if one.is_shared or o.layer == one.layer)

    def _stands_out(self, one: Leaning) -> bool:
        return one.cosine.value < -self.usual(one) / 2


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
        routed = torch.zeros_like(total, dtype=torch.float32)
        for expert, rows, own in kept.added:
            routed.index_add_(0, rows, own)
            self._note(range(expert, expert + 1), rows, own, total[rows].float() - own)
        if self.moe.shared:
            numbers, rows = range(self.moe.routed_experts, len(kept)), torch.arange(len(x))
            self._note(numbers, rows, total.float() - routed, routed, is_shared=True)
        return total

    def _note(
        self,
        experts: range,
        rows: torch.Tensor,
        own: torch.Tensor,
        others: torch.Tensor,
        *,
        is_shared: bool = False,
    ) -> None:
        """Note the leaning of experts that add own [n, d] to rows [n], beside others [n, d]."""
        sizes = torch.tensor([len(text.tokens) for text in self.into.texts.texts])
        owners = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[rows.cpu()]
        sums = torch.zeros(len(sizes), dtype=torch.float64)
        sums.index_add_(0, owners, torch.cosine_similarity(own, others, dim=1).cpu().double())
        counts = torch.bincount(owners, minlength=len(sizes))
        cosine = ratio(sums.tolist(), counts.tolist(), CONFIDENCE)
        if cosine is not None:
            self.into.found.append(Leaning(self.number, experts, cosine, is_shared))


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
class ScaledExperts:
    """Experts of which some add a multiple of what they would."""

    experts: Experts
    scaled: Collection[int]
    factor: float

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
        if number not in self.scaled:
            return expert
        return replace(expert, down=columns_scaled(expert.down, slice(None), self.factor))


@dataclass(frozen=True)
class Negated:
    """The layers of a model, with some experts of one of them negated."""

    layer: int
    negated: range

    def __call__(self, number: int, layer: DecoderLayer) -> DecoderLayer:
        """The layer that runs in place of one, by its number."""
        moe = layer.feed_forward
        if number != self.layer or not isinstance(moe, Moe):
            return layer
        experts = ScaledExperts(moe.experts, self.negated, -1.0)
        return replace(layer, feed_forward=replace(moe, experts=experts))
