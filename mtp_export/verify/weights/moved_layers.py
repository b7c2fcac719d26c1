"""Layers that hold the source's weights of other layers: all of it is told in one sentence, where
the comparison of each weight would tell of some."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.check import Item, Problem, verdict
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.diagnosis.weight_bugs import held_by

_PROBED = 3  # weights of a layer by which another is known: its largest
_MOST = 16  # layers that are looked for


def moved_layers(wrong: Sequence[WeightOnDisk], weights: Mapping[str, WeightOnDisk]) -> Item | None:
    """Return the failure of layers that are other layers of the source; None where there is none.

    wrong: what is not the source's. weights: the source's by their released names.
    """
    of_layer: dict[str, list[WeightOnDisk]] = defaultdict(list)
    for one in wrong:
        of_layer[in_layer(one.stored.weight.name)[0]].append(one)
    of_layer.pop("", None)
    layers = Counter(in_layer(name)[0] for name in weights)
    from_layer = dict[str, str]()
    for layer, own in [*of_layer.items()][:_MOST]:
        held = {other for other in layers if other not in ("", layer)}
        for one in sorted(own, key=lambda one: -math.prod(one.stored.weight.shape))[:_PROBED]:
            last = in_layer(one.stored.weight.name)[1]
            names = {f"{other}.{last}": other for other in held}
            others = {name: weights[name] for name in names if name in weights}
            held = {names[name] for name in held_by(one, others)}
        if len(own) >= max(_PROBED, layers[layer] // 2) and len(held) == 1:
            from_layer[layer] = held.pop()
    if not from_layer:
        return None
    counts = {layer: (len(of_layer[layer]), layers[layer]) for layer in from_layer}
    words = causes.layers_moved(from_layer, counts)
    problems = [Problem(one.name, words) for layer in from_layer for one in of_layer[layer]]
    return verdict("layers in the source's places", problems, f"{len(from_layer)} layers")
