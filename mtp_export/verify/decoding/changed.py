"""Main models with one layer changed, compared on plain text with the model as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from mtp_export.verify.check import EQUAL, GAIN, Item, failed
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.undone import undone
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.statistics import Estimate
from mtp_export.verify.gates import LEAST_HARM_NATS, LEAST_RESIZED_NATS

CONFIDENCE = 0.98
# By which the same texts under the same weights differ, added up in another order.
_SAME_NATS = 1e-5
# Of the best gain: what is less by no more explains as much, however sure the difference is.
AS_MUCH = 0.01
# The same of what is trained, which gives back a share of what is lost.
_LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Changed:
    """A main model with one layer changed, the likelihood of texts under it, and its gain."""

    variant: LayerVariant
    under: Likelihood
    gain: Estimate

    def gains(self, least: float) -> bool:
        """True where the texts are likelier by more than so many nats, and by the interval."""
        low = self.gain.low
        return low is not None and low > 0 and self.gain.value > least

    @property
    def better(self) -> bool:
        """True where the texts are likelier by far."""
        return self.gains(LEAST_HARM_NATS)

    @property
    def may_be_better(self) -> bool:
        """True where the interval leaves room for that."""
        high = self.gain.high
        return high is not None and high > LEAST_HARM_NATS and self.gain.value > 0

    @property
    def is_far(self) -> bool:
        """True for a gain that makes a layer suspected that nothing else does."""
        variant = self.variant
        is_told = variant.is_left_out or variant.is_of_tensor
        return is_told or self.gain.value > LEAST_RESIZED_NATS

    def is_told_from(self, best: Changed) -> bool:
        """True for one that gains less than another, text by text; by intervals, on other texts."""
        found = self.under.fitted_gain(best.under, CONFIDENCE)
        if found is None:
            ends = self.gain.high, best.gain.low
            return ends[0] is not None and ends[1] is not None and ends[0] < ends[1]
        return found.low is not None and found.low > AS_MUCH * max(0.0, best.gain.value)

    def is_the_same_as(self, other: Changed) -> bool:
        """True for a change that does to every text what another does: it is that one, found in
        another way. Changes of single tensors are not: negated values do what a negated o_proj
        does, as their whole half does, and any may be wrong. Nor are halves trained together, which
        differ in what is lost without each."""
        if self.variant.is_of_tensor or other.variant.is_of_tensor:
            return False
        if abs(self.gain.value - other.gain.value) >= _SAME_NATS:
            return False
        found = self.under.fitted_gain(other.under, CONFIDENCE)
        ends = () if found is None else (found.low, found.high)
        return bool(ends) and all(end is not None and abs(end) < _SAME_NATS for end in ends)


def compared(own: Likelihood, others: Iterable[tuple[LayerVariant, Likelihood]]) -> list[Changed]:
    """Variants compared with the model as it is, each at its temperature, best first."""
    gains = ((one, text, own.fitted_gain(text, CONFIDENCE)) for one, text in others)
    return best_first(Changed(one, text, gain) for one, text, gain in gains if gain is not None)


def best_first(tried: Iterable[Changed]) -> list[Changed]:
    return sorted(tried, key=lambda one: -one.gain.value)


def explained(name: str, tried: Sequence[Changed], better: Sequence[Changed], bound: str) -> Item:
    """The failure that those that are better explain."""
    best = better[0]
    figure = f"{best.gain.value:+.3f} nats when {best.variant.change}"
    equal = explaining(better)
    all_causes = causes.one_of([one.variant.cause for one in equal])
    cause = causes.likelier(all_causes, best.gain.value, best.variant.change)
    undone_here = undone(_gains(tried), named=_gains(equal))
    data = {**undone_here, EQUAL: len(equal), GAIN: best.gain.value}
    return failed(name, cause, figure=figure, bound=bound, data=data)


def _gains(tried: Sequence[Changed]) -> list[tuple[str, Estimate]]:
    return [(one.variant.change, one.gain) for one in tried]


def leaves_out(better: Sequence[Changed]) -> bool:
    """True where a half, or an expert, that adds nothing explains as much as the best."""
    return any(one.variant.is_left_out for one in explaining(better))


def explaining(better: Sequence[Changed]) -> Sequence[Changed]:
    """Those that are not told from the best, what is left out first: any other change of a half
    that does harm may be better by chance. What is trained and what is undone take turns."""
    best = better[0]
    changes = (one for one in better if not one.variant.is_trained)
    undone = [one for one in changes if one is best or not one.is_told_from(best)]
    # Training gives back a share of what is lost: by how much it is less tells little. It tells
    # nothing beside a size, which makes up for any noise, or several changes that do as much.
    is_one = not best.variant.is_size and all(one.is_the_same_as(undone[0]) for one in undone[1:])
    trained = [one for one in better if one.variant.is_trained]
    beside = best if is_one or not trained else trained[0]
    trained = [one for one in trained if one.gain.value >= _LEAST_SHARE * beside.gain.value]
    turns = sorted((undone, trained), key=lambda ones: best not in ones)
    mixed = filter(None, chain.from_iterable(zip_longest(*turns)))
    found = list[Changed]()
    for one in sorted(mixed, key=lambda one: not one.variant.is_left_out):
        if not any(map(one.is_the_same_as, found)):
            found.append(one)
    return found
