"""Norms of queries and keys, which training keeps alike: scores have the product of both, so that
its gradient for one times the one is that for the other times the other.

Source: as of diagnosis/neurons.py. Rotation mixes the two elements of a pair, whose squares are
alike in sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_high, median_low
from typing import TYPE_CHECKING

from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.parts.gqa import Gqa
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.progress import counted
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import balance as causes
from mtp_export.verify.diagnosis.causes import decoding
from mtp_export.verify.evidence.unwritten import written_weights

if TYPE_CHECKING:
    import torch

    from mtp_export.verify.context import Context
    from mtp_export.verify.evidence.parts import PartLayout

_NAME = "norms of queries and keys are alike"
# Root mean squares of the logarithms of quotients of both: 0.03 and less in the trained fixtures.
# Nothing is told of a model in whose layers it is usually more, nor of a layer where it is within
# so many median deviations of the median.
_MOST_USUAL, _MOST_APART, _MOST_SPREADS = 0.1, 0.3, 10.0
# Those of a trained model go together in most layers, element by element: by 5.5 and more in the
# trained fixtures. Norms that are narrow are near by chance where their sizes are.
_LEAST_AGREEMENT = 2.5
_STANDING = 3.0  # times as far apart as any other layer: few tell little of what is usual
# Elements that are left out: those farthest apart, as some grow far larger than the others; and of
# smaller elements than this share of the median, which cross zero, quotients tell nothing.
_OUTLIERS, _LEAST_SHARE = 1 / 16, 0.1
_AS_GOOD = 1.5  # times as far apart as with the change that mends a norm best


@dataclass(frozen=True)
class Pair:
    """Norms of queries and keys of one layer: their names, weights [n] as stored, what is added to
    these, and the number of elements that rotate, in two halves."""

    names: tuple[str, str]
    weights: tuple[torch.Tensor, torch.Tensor]
    offset: float
    rotary: int

    @property
    def apart(self) -> float:
        """The root mean square of the natural logarithms of the norms of queries over those of
        keys, by pair, but for outliers."""
        query, key = (self._by_pair(weight.double() + self.offset) for weight in self.weights)
        squares = ((query / key).log() / 2).square().sort().values
        return float(squares[: len(squares) - int(_OUTLIERS * len(squares))].mean().sqrt())

    @property
    def agreement(self) -> float:
        """Standard errors by which the elements of both go together more than by chance."""
        import torch

        from mtp_export.verify.diagnosis.neurons import agreements

        both = [self._by_pair(weight.double() + self.offset) for weight in self.weights]
        return float(agreements(torch.stack(both))[0, 1])

    def _by_pair(self, weight: torch.Tensor) -> torch.Tensor:
        import torch

        squares = weight.square()
        turned = squares[: self.rotary].view(2, -1).mean(0)
        found = torch.cat([turned, squares[self.rotary :]])
        return found.clamp_min(max(1e-30, _LEAST_SHARE**2 * float(found.median())))


def run(context: Context) -> Iterator[Item]:
    """The norms of all layers that have such, main and MTP, but for those that an earlier item is
    about: of that item, not of its pair, is what is wrong."""
    lost = context.unwritten_tensors | context.named_tensors
    pairs = [pair for layout in context.read_layouts for pair in _pairs(layout, lost)]
    if pairs:
        yield verdict(
            _NAME,
            [Problem(pair.names[0], _explained(pair)) for pair in far_apart(pairs)],
            figure=counted(len(pairs), "layer"),
            bound=f"≤ {_MOST_APART} apart, where {_MOST_USUAL} and less is usual",
        )


def far_apart(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the layers of a model whose norms are farther apart than those of its layers are."""
    found = [pair.apart for pair in pairs]
    usual = median_low(found)
    if usual > _MOST_USUAL or median_high(pair.agreement for pair in pairs) < _LEAST_AGREEMENT:
        return []
    spread = median_low([abs(apart - usual) for apart in found])
    most = max(_MOST_APART, usual + _MOST_SPREADS * spread)
    least = _STANDING * max(apart for apart in found if apart <= most)
    return [pair for pair, apart in zip(pairs, found, strict=True) if apart > max(most, least)]


def _pairs(layout: PartLayout, lost: frozenset[str]) -> Iterator[Pair]:
    """Yield the norms of a part whose tensors are written."""
    family = layout.stored.family
    stored = {one.stored.weight.name: one for one in written_weights(layout, lost)}
    for layer in family.every_layer:
        part = layer.attention
        if not isinstance(part, Gqa) or not part.sizes.has_norms:
            continue
        modules = part.modules(layer.attention_prefix)
        names = (modules.query_norm, modules.key_norm)
        query, key = (stored.get(weight_name(name)) if name else None for name in names)
        if query is not None and key is not None and query.rows == key.rows:
            values = (_values(query), _values(key))
            yield Pair((query.name, key.name), values, family.facts.norm_offset, part.sizes.rope)


def _values(norm: WeightOnDisk) -> torch.Tensor:
    return norm.encoded(0, norm.rows).dequantize().float()


def _explained(pair: Pair) -> str:
    """Say what mends a norm, if a change does."""
    found = sorted(_changed(pair), key=lambda one: one[0])
    least = max(found[0][0], 1e-3)
    mending = [words for far, words in found if far <= min(_MOST_USUAL, _AS_GOOD * least)]
    if mending:
        return decoding.one_of(mending)
    return causes.norms_apart(*pair.names, math.exp(pair.apart))


def _changed(pair: Pair) -> Iterator[tuple[float, str]]:
    """Yield how far apart the norms are with a change of one undone, and what is wrong with it."""
    from mtp_export.verify.diagnosis.tensor_variants import OF_VECTORS, changed_vector

    for place, name in enumerate(pair.names):
        for change in OF_VECTORS:
            weights = [*pair.weights]
            weights[place] = changed_vector(weights[place], change)
            other = replace(pair, weights=(weights[0], weights[1]))
            yield other.apart, decoding.of_tensor(name, "", change.wrong)
