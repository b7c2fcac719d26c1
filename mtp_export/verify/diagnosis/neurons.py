"""Norms of the inner values of gated MLPs, which training keeps alike: what a neuron reads with in
gate and up grows with what it adds through down. Rows or columns in another order, another's
tensor, and a factor break that, without a source.

Source: Du, Hu and Lee, "Algorithmic Regularization in Learning Deep Homogeneous Models: Layers are
Automatically Balanced" (arXiv 1806.00900), section 2: gradient flow keeps the difference of the
squared norms of a neuron's incoming and outgoing weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch

from mtp_export.verify.diagnosis.causes import balance as causes
from mtp_export.verify.diagnosis.causes import decoding
from mtp_export.verify.diagnosis.reorderings import reorderings

GATE, UP, DOWN = range(3)
_PAIRS = tuple(combinations((GATE, UP, DOWN), 2))
_ROWS, _COLUMNS = ([pair[end] for pair in _PAIRS] for end in range(2))
# MLPs that one is compared with. The least median of their correlations that tells anything: those
# of random weights have none, those of the trained fixtures 0.7 to 0.9 of up and down.
LEAST_ALIKE, LEAST_USUAL = 5, 0.5
# Standard errors that the correlations of a tensor with both others lie below the medians in sum,
# in Fisher's transform: 4.7 and less in the trained fixtures. Each lies below half of its median,
# and no farther from none than in any other order: layers of a good model may differ in how far
# theirs go together, but none has neurons that do not at all.
_MOST_ERRORS, _CHANCE_ERRORS = 6.5, 4.0
# Where the sum is more than this, an order that makes it less by that is the cause.
_SUSPICIOUS_ERRORS, _MENDED_ERRORS = 3.0, 8.0
# Octaves between the sizes of two matrices beyond the median, and beyond its spread: 0.1 and less
# in the trained fixtures.
_LEAST_OCTAVES, _MOST_SPREADS = 0.7, 8.0
_LEAST_SPREAD = 0.02
_MOST_RESIZED = 0.05  # of MLPs that are alike: of more it is how they were trained
_SIGMA = 1.4826  # the standard deviation over the median of absolute deviations
_MOST_CORRELATED = 0.999


@dataclass(frozen=True)
class Neurons:
    """Names of the tensors of a gated MLP, gate, up and down, and the natural logarithms of the
    norms of their rows, of down the columns [3, n], float64."""

    names: tuple[str, str, str]
    logs: torch.Tensor

    @classmethod
    def of(cls, names: tuple[str, str, str], matrices: Sequence[torch.Tensor]) -> Neurons:
        """Take the norms of gate and up [n, in] and of down [out, n], which may be parts of the
        matrices of any number of inputs and outputs."""
        gate, up, down = (one.square() for one in matrices)
        means = torch.stack([gate.mean(1), up.mean(1), down.mean(0)])
        return cls(names, means.double().clamp_min(1e-30).log() / 2)

    @cached_property
    def agreements(self) -> torch.Tensor:
        """Fisher's transform of the correlations of the logarithms by pair [3], in standard
        errors."""
        centred = self.logs - self.logs.mean(1, keepdim=True)
        norms = centred.norm(dim=1).clamp_min(1e-30)
        found = (centred @ centred.t() / torch.outer(norms, norms))[_ROWS, _COLUMNS]
        transformed = found.clamp(-_MOST_CORRELATED, _MOST_CORRELATED).atanh()
        return transformed * math.sqrt(max(1, self.logs.shape[1] - 3))

    @property
    def octaves(self) -> torch.Tensor:
        """The mean logarithms to base 2 of each pair's quotients [3]."""
        sizes = self.logs.mean(1) / math.log(2)
        return sizes[_ROWS] - sizes[_COLUMNS]

    def with_logs(self, place: int, logs: torch.Tensor) -> Neurons:
        """Return the MLP with other norms of one tensor."""
        changed = self.logs.clone()
        changed[place] = logs
        return replace(self, logs=changed)


@dataclass(frozen=True)
class _Usual:
    """Medians over MLPs of one kind, and standard deviations, by pair [3]."""

    agreement: torch.Tensor
    spread: torch.Tensor
    octaves: torch.Tensor
    octave_spread: torch.Tensor
    is_trained: bool

    @classmethod
    def of(cls, alike: Sequence[Neurons]) -> _Usual:
        agreement, spread = _middle(torch.stack([one.agreements for one in alike]))
        octaves, octave_spread = _middle(torch.stack([one.octaves for one in alike]))
        width = math.sqrt(max(1, alike[0].logs.shape[1] - 3))
        least = math.atanh(LEAST_USUAL) * width
        return cls(
            agreement,
            spread.clamp_min(1.0),
            octaves,
            octave_spread.clamp_min(_LEAST_SPREAD),
            is_trained=bool(agreement[_PAIRS.index((UP, DOWN))] >= least),
        )

    def behind(self, one: Neurons, place: int) -> float:
        """Standard errors that a tensor's agreements with both others lie below the usual ones."""
        errors = (self.agreement - one.agreements) / self.spread
        return float(errors[_of(place)].sum())

    def is_odd(self, one: Neurons, place: int) -> bool:
        """True for a tensor that goes with the others no more than by chance, where that is far
        less than is usual."""
        found = one.agreements
        is_low = (found < self.agreement / 2) & (found.abs() < _CHANCE_ERRORS)
        return bool(is_low[_of(place)].all()) and self.behind(one, place) >= _MOST_ERRORS

    def off(self, one: Neurons) -> list[float]:
        """Octaves that each pair's sizes are off the usual; 0 within its bounds."""
        off = one.octaves - self.octaves
        bound = (_MOST_SPREADS * self.octave_spread).clamp_min(_LEAST_OCTAVES)
        return torch.where(off.abs() > bound, off, 0.0).tolist()


def _middle(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the median over rows [n, 3], and the standard deviation by that of deviations."""
    middle = values.median(0).values
    return middle, _SIGMA * (values - middle).abs().median(0).values


@dataclass(frozen=True)
class _Suspect:
    """A tensor of an MLP whose norms do not go with the others'."""

    neurons: Neurons
    place: int
    usual: _Usual

    @property
    def name(self) -> str:
        return self.neurons.names[self.place]

    @property
    def logs(self) -> torch.Tensor:
        return self.neurons.logs[self.place]

    @property
    def is_odd(self) -> bool:
        """True where the tensor goes with the others by chance alone."""
        return self.usual.is_odd(self.neurons, self.place)

    def mended(self, logs: torch.Tensor) -> float:
        """Standard errors by which other norms go with the others better; 0 where they do not go
        as far as is usual."""
        if logs.shape != self.logs.shape:
            return 0.0
        other = self.neurons.with_logs(self.place, logs)
        if any(self.usual.is_odd(other, place) for place in (GATE, UP, DOWN)):
            return 0.0
        own, behind = (self.usual.behind(one, self.place) for one in (self.neurons, other))
        return own - behind

    @property
    def order(self) -> str:
        """The order that the tensor is in, in words; "" where none is found."""
        others = [place for place in (GATE, UP, DOWN) if place != self.place]
        wanted = self.neurons.logs[others].mean(0)
        tried = reorderings(self.logs, wanted, self.axis)
        mended, words = max((self.mended(logs), wrong) for wrong, logs in tried)
        return words if mended >= (_MOST_ERRORS / 2 if self.is_odd else _MENDED_ERRORS) else ""

    @property
    def axis(self) -> str:
        """The axis of the neurons, in words."""
        return "columns" if self.place == DOWN else "rows"


def are_trained(alike: Sequence[Neurons]) -> bool:
    """Return whether the norms of MLPs that are alike go together."""
    return len(alike) >= LEAST_ALIKE and _Usual.of(alike).is_trained


def problems(
    siblings: Sequence[Sequence[Neurons]], others: Sequence[Sequence[Neurons]]
) -> Iterator[tuple[str, str]]:
    """Yield names of tensors and sentences on what is wrong with them. siblings: experts of each
    layer, whose sizes are alike too; others: MLPs of several layers that are alike in size and
    use."""
    suspects = list[_Suspect]()
    for number, alike in enumerate((*siblings, *others)):
        if len(alike) < LEAST_ALIKE:
            continue
        usual = _Usual.of(alike)
        sized = alike if number < len(siblings) else ()
        resized = [(one, *found) for one in sized if (found := _resized(usual.off(one)))]
        if len(resized) <= max(1, _MOST_RESIZED * len(alike)):
            for one, place, factor in resized:
                yield one.names[place], causes.times(one.names[place], factor)
        if usual.is_trained:
            suspects += filter(None, (_suspect(one, usual) for one in alike))
    odd, exchanged = [one for one in suspects if one.is_odd], set[str]()
    for first, second in combinations(odd, 2):
        if min(first.mended(second.logs), second.mended(first.logs)) >= _MOST_ERRORS / 2:
            exchanged |= {first.name, second.name}
            yield first.name, causes.exchanged(first.name, second.name)
    for suspect in (one for one in suspects if one.name not in exchanged):
        if order := suspect.order:
            yield suspect.name, decoding.of_tensor(suspect.name, "", order)
        elif suspect.is_odd:
            yield suspect.name, causes.does_not_go_together(suspect.name, suspect.axis)


def _resized(off: Sequence[float]) -> tuple[int, float] | None:
    """Return the tensor that both of its pairs tell to be off, and the factor that it is."""
    for place in (GATE, UP, DOWN):
        signs = [(0 if place not in pair else 1 if pair[0] == place else -1) for pair in _PAIRS]
        own = [value * sign for value, sign in zip(off, signs, strict=True) if sign]
        others = [value for value, sign in zip(off, signs, strict=True) if not sign]
        if min(own) * max(own) > 0 and not any(others):
            return place, 2.0 ** (sum(own) / len(own))
    return None


def _suspect(one: Neurons, usual: _Usual) -> _Suspect | None:
    """Return the tensor that lies farthest behind, if it lies far enough."""
    behind = {place: usual.behind(one, place) for place in (GATE, UP, DOWN)}
    place = max(behind, key=behind.__getitem__)
    return _Suspect(one, place, usual) if behind[place] >= _SUSPICIOUS_ERRORS else None


def _of(place: int) -> list[int]:
    """Return the numbers of the pairs that a tensor is of."""
    return [number for number, pair in enumerate(_PAIRS) if place in pair]
