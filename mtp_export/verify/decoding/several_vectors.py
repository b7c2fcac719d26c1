"""Vectors of a layer to all of which the same was done, as smoothing for a quantization divides its
norms: beside the one that is undone, the same in others betters the texts further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from mtp_export.verify.decoding.changed import CONFIDENCE, Changed
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.layer_variants import changed_tensors
from mtp_export.verify.diagnosis.tensor_variants import OF_VECTORS, Change
from mtp_export.verify.diagnosis.trainable import Spot
from mtp_export.verify.diagnosis.trained import Trials
from mtp_export.verify.gates import LEAST_TRAINED_NATS


@torch.no_grad()
def of_several(trials: Trials, best: Changed) -> Changed | None:
    """Return a vector's change undone in others of its layer as well; None where it betters none,
    and of a matrix."""
    number = best.variant.layer
    spots = [s for some in trials.halves.values() for s in some if s.layer == number]
    vectors = [spot for spot in spots if spot.values().dim() == 1]
    for spot, change in product(vectors, OF_VECTORS):
        for words, layer in _changed(trials, trials.model.part(spot.layer), spot, change):
            if words == best.variant.change:
                others = [one for one in vectors if one is not spot]
                return _with_others(trials, best, layer, others, change)
    return None


def _with_others(
    trials: Trials, best: Changed, layer: Any, others: Sequence[Spot], change: Change
) -> Changed | None:
    names, under = list[str](), best.under
    for spot in others:
        for _, both in _changed(trials, layer, spot, change):
            text = trials.under_layer(spot.layer, both)
            gain = under.fitted_gain(text, CONFIDENCE)
            if gain is not None and (gain.low or 0) > 0 and gain.value > LEAST_TRAINED_NATS:
                names.append(spot.place.name)
                layer, under = both, text
    gain = trials.own.fitted_gain(under, CONFIDENCE)
    if not names or gain is None:
        return None
    one, more = best.variant, causes.likewise(names)
    several = replace(one, change=f"{one.change}; {more}", cause=f"{one.cause}; {more}")
    return Changed(several, under, gain)


def _changed(trials: Trials, layer: Any, spot: Spot, change: Change) -> list[tuple[str, Any]]:
    """Return a layer with a change of a vector undone, and the words for it; nothing where it does
    not fit."""
    where = trials.model.where(spot.layer)
    found = changed_tensors(spot.layer, layer, [spot.place], [change], where)
    return [(variant.change, other) for variant, other in found]
