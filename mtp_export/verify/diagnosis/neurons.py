"""Norms of the inner values of gated MLPs, which training keeps alike: what a neuron reads with in
gate and up grows with what it adds through down. Rows or columns in another order, another's
tensor, and a factor break that, without a source.

Source: Du, Hu and Lee, "Algorithmic Regularization in Learning Deep Homogeneous Models: Layers are
Automatically Balanced" (arXiv 1806.00900), section 2: gradient flow keeps the difference of the
squared norms of a neuron's incoming and outgoing weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
# in Fisher's transform: 6.9 and less in the trained fixtures. Each lies below half of its median,
# and no farther from none than in any other order, which none does there: layers of a good model
# may differ in how far theirs go together, but none has neurons that do not at all.
_MOST_ERRORS, _CHANCE_ERRORS = 6.5, 4.0
# What training left as it was made, as experts that no token picks, has neurons of one size: less
# than this share of the usual spread.
_LEAST_WIDTH = 0.5
_MOST_ODD = 0.125  # of MLPs that are alike: of more, some are trained less than others
# Where the sum is more than this, an order that makes it less by that is the cause: of odd tensors
# one that is found by search, which makes it less by 8.3 and more where it is, by 7.6 and less with
# one exception in 200 of other tensors in their place.
_SUSPICIOUS_ERRORS, _MENDED_ERRORS = 3.0, 8.0
# Octaves between the sizes of two matrices beyond the median, and beyond its spread: 0.1 and less
# in the trained fixtures.
_LEAST_OCTAVES, _MOST_SPREADS = 0.7, 8.0
_LEAST_SPREAD = 0.02
_STANDING = 3.0  # times as far off as any other of its like: few tell little of what is usual
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
        return cls.of_means(names, torch.stack([gate.mean(1), up.mean(1), down.mean(0)]))

    @classmethod
    def of_means(cls, names: tuple[str, str, str], means: torch.Tensor) -> Neurons:
        """Take the mean squares of rows of gate and up, and of columns of down [3, n]."""
        return cls(names, means.double().clamp_min(1e-30).log() / 2)

    @cached_property
    def agreements(self) -> torch.Tensor:
        """Fisher's transform of the correlations of ranks by pair [3], in standard errors: some
        neurons far larger than the others, or pruned ones, have no more weight than any."""
        return agreements(self.logs)[_ROWS, _COLUMNS]

    @property
    def octaves(self) -> torch.Tensor:
        """The median logarithms to base 2 of each pair's quotients [3]."""
        return (self.logs[_ROWS] - self.logs[_COLUMNS]).median(1).values / math.log(2)

    @property
    def sizes(self) -> torch.Tensor:
        """The median logarithms to base 2 of each tensor's norms [3]."""
        return self.logs.median(1).values / math.log(2)

    @property
    def widths(self) -> torch.Tensor:
        """The median deviations of each tensor's logarithms from their median [3]."""
        return (self.logs - self.logs.median(1, keepdim=True).values).abs().median(1).values

    def with_logs(self, place: int, logs: torch.Tensor) -> Neurons:
        """Return the MLP with other norms of one tensor."""
        changed = self.logs.clone()
        changed[place] = logs
        return replace(self, logs=changed)


@dataclass(frozen=True)
class _Usual:
    """Medians over MLPs of one kind, and standard deviations, by pair [3]; of widths and sizes by
    tensor [3]."""

    agreement: torch.Tensor
    spread: torch.Tensor
    octaves: torch.Tensor
    octave_spread: torch.Tensor
    widths: torch.Tensor
    sizes: torch.Tensor
    size_spread: torch.Tensor
    is_trained: bool

    @classmethod
    def of(cls, alike: Sequence[Neurons]) -> _Usual:
        agreement, spread = _upper([one.agreements for one in alike])
        octaves, octave_spread = _middle([one.octaves for one in alike])
        sizes, size_spread = _middle([one.sizes for one in alike])
        width = math.sqrt(max(1, alike[0].logs.shape[1] - 3))
        least = math.atanh(LEAST_USUAL) * width
        return cls(
            agreement,
            spread.clamp_min(1.0),
            octaves,
            octave_spread.clamp_min(_LEAST_SPREAD),
            widths=_middle([one.widths for one in alike])[0],
            sizes=sizes,
            size_spread=size_spread,
            is_trained=bool(agreement[_PAIRS.index((UP, DOWN))] >= least),
        )

    def was_trained(self, one: Neurons) -> bool:
        """True for an MLP whose neurons differ in size as those of its like do."""
        return bool((one.widths >= _LEAST_WIDTH * self.widths).all())

    def behind(self, one: Neurons, place: int) -> float:
        """Standard errors that a tensor's agreements with both others lie below the usual ones."""
        errors = (self.agreement - one.agreements) / self.spread
        return float(errors[_of(place)].sum())

    def is_odd(self, one: Neurons, place: int) -> bool:
        """True for a tensor that goes with the others no more than by chance, where that is far
        less than is usual, and the others go with each other."""
        low = self._by_chance(one)
        own = _of(place)
        others = low & (self.agreement >= _CHANCE_ERRORS)
        others[own] = False
        is_alone = bool(low[own].all()) and not bool(others.any())
        return is_alone and self.behind(one, place) >= _MOST_ERRORS

    def _by_chance(self, one: Neurons) -> torch.Tensor:
        """The mask of pairs [3] that go together no more than by chance, and less than is usual."""
        found = one.agreements
        return (found < self.agreement / 2) & (found.abs() < _CHANCE_ERRORS)

    def resized(self, one: Neurons) -> tuple[int, float] | None:
        """Return the tensor that both of its pairs tell to be off, and the factor that it is: of
        an MLP that goes together otherwise, and the others of which are as large as is usual."""
        off = one.octaves - self.octaves
        off = torch.where(off.abs() > _bound(self.octave_spread), off, 0.0)
        unusual = (one.sizes - self.sizes).abs() > _bound(self.size_spread)
        if self.is_trained and bool(self._by_chance(one).any()):
            return None
        for place in (GATE, UP, DOWN):
            own = [
                float(off[number]) * (1 if _PAIRS[number][0] == place else -1)
                for number in _of(place)
            ]
            others = [other for other in (GATE, UP, DOWN) if other != place]
            is_alone = int(off.count_nonzero()) == len(own) and not bool(unusual[others].any())
            if is_alone and min(own) * max(own) > 0:
                return place, 2.0 ** (sum(own) / len(own))
        return None


def _middle(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the median of vectors [3], and the standard deviation by that of deviations."""
    rows = torch.stack([*values])
    middle = rows.median(0).values
    return middle, _SIGMA * (rows - middle).abs().median(0).values


def _upper(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the median of vectors [3], and the standard deviation by those above it: what is wrong
    with some makes theirs less."""
    rows = torch.stack([*values]).sort(0).values
    middle = rows[len(rows) // 2]
    return middle, _SIGMA * (rows[len(rows) // 2 :] - middle).median(0).values


def _bound(spread: torch.Tensor) -> torch.Tensor:
    """Return the octaves beyond which something is not as large as is usual."""
    return (_MOST_SPREADS * spread).clamp_min(_LEAST_OCTAVES)


@dataclass(frozen=True)
class _Suspect:
    """The tensor of an MLP whose norms go least with the others'; is_odd: by chance alone."""

    neurons: Neurons
    place: int
    usual: _Usual
    is_odd: bool

    @classmethod
    def of(cls, one: Neurons, usual: _Usual) -> _Suspect:
        """Find it: the one that lies farthest behind."""
        place = max((GATE, UP, DOWN), key=lambda place: usual.behind(one, place))
        return cls(one, place, usual, usual.is_odd(one, place))

    @property
    def name(self) -> str:
        return self.neurons.names[self.place]

    @property
    def logs(self) -> torch.Tensor:
        return self.neurons.logs[self.place]

    @property
    def behind(self) -> float:
        """Standard errors that it lies below what is usual."""
        return self.usual.behind(self.neurons, self.place)

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
        mended, is_best_of_many, words = max(
            (self.mended(logs), is_searched, wrong) for wrong, logs, is_searched in tried
        )
        is_odd = self.is_odd and not is_best_of_many
        return words if mended >= (_MOST_ERRORS / 2 if is_odd else _MENDED_ERRORS) else ""

    @property
    def axis(self) -> str:
        """The axis of the neurons, in words."""
        return "columns" if self.place == DOWN else "rows"


def agreements(values: torch.Tensor) -> torch.Tensor:
    """Return Fisher's transform of the correlations of ranks of every two rows [k, n], in standard
    errors [k, k]."""
    ranks = values.argsort(dim=1, stable=True).argsort(dim=1).double()
    centred = ranks - ranks.mean(1, keepdim=True)
    norms = centred.norm(dim=1).clamp_min(1e-30)
    found = centred @ centred.t() / torch.outer(norms, norms)
    transformed = found.clamp(-_MOST_CORRELATED, _MOST_CORRELATED).atanh()
    return transformed * math.sqrt(max(1, values.shape[1] - 3))


def are_trained(alike: Sequence[Neurons]) -> bool:
    """Return whether the norms of MLPs that are alike go together."""
    return len(alike) >= LEAST_ALIKE and _Usual.of(alike).is_trained


def problems(
    siblings: Sequence[Sequence[Neurons]], others: Sequence[Sequence[Neurons]]
) -> Iterator[tuple[str, str]]:
    """Yield names of tensors and sentences on what is wrong with them. siblings: experts of each
    layer, whose sizes are alike too; others: MLPs of several layers that are alike in size and
    use, of which a few are compared with others of as many neurons, for their orders alone."""
    suspects, few, known = list[_Suspect](), list[Neurons](), dict[int, _Usual]()
    for number, alike in enumerate((*siblings, *others)):
        if len(alike) < LEAST_ALIKE:
            few += alike
            continue
        usual = _Usual.of(alike)
        trained = [one for one in alike if usual.was_trained(one)]
        if number < len(siblings):
            yield from _resized(trained, usual)
        if usual.is_trained:
            suspects += _suspects(trained, usual)
            known.setdefault(alike[0].logs.shape[1], usual)
    suspects += _of_few(few, known)
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


def _resized(alike: Sequence[Neurons], usual: _Usual) -> Iterator[tuple[str, str]]:
    """Yield the tensors of another size than their like; none where many are."""
    found = [(one, *resized) for one in alike if (resized := usual.resized(one))]
    found = found if len(found) <= max(1, _MOST_RESIZED * len(alike)) else []
    off = {one.names: (one.octaves - usual.octaves).abs() for one in alike}
    told = {one.names for one, *_ in found}
    others = [far for names, far in off.items() if names not in told]
    least = _STANDING * torch.stack(others).amax(0) if others else torch.zeros(len(_PAIRS))
    for one, place, factor in found:
        if bool((off[one.names] < least)[_of(place)].any()):
            continue
        name = one.names[place]
        yield name, decoding.of_tensor(name, "", decoding.times(factor))


def _suspects(alike: Sequence[Neurons], usual: _Usual) -> list[_Suspect]:
    """Return the tensors that lie far behind. Odd ones are few, and far behind all others: where
    MLPs differ by degrees in how far they go together, none is."""
    found = [_Suspect.of(one, usual) for one in alike]
    least = max((one.behind for one in found if not one.is_odd), default=0.0) + _CHANCE_ERRORS
    odd = {one.name for one in found if one.is_odd and one.behind >= least}
    if len(odd) > max(2, _MOST_ODD * len(alike)):
        odd = set()
    suspects = [one for one in found if one.behind >= _SUSPICIOUS_ERRORS]
    return [replace(one, is_odd=one.name in odd) for one in suspects]


def _of_few(few: Sequence[Neurons], known: Mapping[int, _Usual]) -> Iterator[_Suspect]:
    """Yield the tensors of MLPs of a kind of which there are too few, that lie far behind what is
    usual in others of as many neurons [n], by their number: none of them as odd."""
    for one in few:
        usual = known.get(one.logs.shape[1])
        if usual is not None and usual.was_trained(one):
            yield from (replace(found, is_odd=False) for found in _suspects([one], usual))


def _of(place: int) -> list[int]:
    """Return the numbers of the pairs that a tensor is of."""
    return [number for number, pair in enumerate(_PAIRS) if place in pair]
