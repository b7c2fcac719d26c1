"""Norms before gated MLPs and the columns that read them, which training keeps alike: what a norm
makes larger is read with larger weights. So norms of two layers in each other's place, and one in
another order, show in the weights alone.

Source: as of neurons.py, of an element of a norm beside the column of gate and up that takes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from mtp_export.verify.diagnosis.causes import balance as causes
from mtp_export.verify.diagnosis.causes import decoding
from mtp_export.verify.diagnosis.neurons import LEAST_USUAL, agreements
from mtp_export.verify.diagnosis.reorderings import reorderings

# Layers that tell what is usual.
LEAST_LAYERS = 3
# Standard errors by which norms go better with the columns in another place: of two norms that are
# exchanged each, and both in sum; of one in another order. In the trained fixtures 0 and less of
# all pairs and -3.5 and less in any order; with two exchanged 9.5 and more in sum, 3.5 and more of
# each.
_LEAST_RISE, _LEAST_RISES, _MENDED = 2.0, 5.0, 5.0


@dataclass(frozen=True)
class NormPlace:
    """A norm before a gated MLP: the name of its tensor, the natural logarithms of its values [d],
    and of the norms of the columns that read them [d]."""

    name: str
    values: torch.Tensor
    columns: torch.Tensor


def misplaced(places: Sequence[NormPlace]) -> Iterator[tuple[str, str]]:
    """Yield names of norms of one size and what is wrong with them; nothing of a model whose norms
    do not usually go with their columns."""
    count = len(places)
    if count < LEAST_LAYERS:
        return
    rows = [*(one.values for one in places), *(one.columns for one in places)]
    fits = agreements(torch.stack(rows))[:count, count:]
    own = fits.diagonal()
    usual = float(fits.amax(1).median())  # of those that are exchanged too
    if usual < math.atanh(LEAST_USUAL) * math.sqrt(max(1, len(rows[0]) - 3)):
        return
    seen = set[int]()
    for rises, one, other in sorted(_exchanges(fits), reverse=True):
        good = max(float(fits[one, other]), float(fits[other, one])) >= usual / 2
        if good and rises >= _LEAST_RISES and seen.isdisjoint((one, other)):
            seen |= {one, other}
            yield places[one].name, causes.exchanged(places[one].name, places[other].name)
    for number in range(count):
        if number not in seen and float(own[number]) < usual / 2:
            yield from _ordered(places[number], float(own[number]), usual)


def _exchanges(fits: torch.Tensor) -> Iterator[tuple[float, int, int]]:
    """Yield the pairs of norms that both go better with each other's columns, and by how much."""
    for one, other in combinations(range(len(fits)), 2):
        rises = [float(fits[a, b] - fits[a, a]) for a, b in ((one, other), (other, one))]
        if min(rises) >= _LEAST_RISE:
            yield sum(rises), one, other


def _ordered(place: NormPlace, own: float, usual: float) -> Iterator[tuple[str, str]]:
    """Yield the order of a norm that goes with its columns in another one."""
    tried = reorderings(place.values, place.columns, "elements")
    found = [
        (float(agreements(torch.stack([values, place.columns]))[0, 1]), words)
        for words, values, _ in tried
    ]
    best, words = max(found)
    if best >= usual / 2 and best - own >= _MENDED:
        yield place.name, decoding.of_tensor(place.name, "", words)
