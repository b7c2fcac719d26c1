"""Variants of an MTP module whose norms or matrices are off by a number: 1 + w, a sign, a factor.

Most of them make the module more or less certain of what it drafts anyway, which its scores show as
a gain: they explain a fault only where more drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.changed_weight import columns_scaled, linears_scaled
from mtp_export.verify.diagnosis.tensor_variants import (
    Place,
    exchanged,
    layer_places,
    tensor_variants,
)
from mtp_export.verify.diagnosis.variants import Variant, unchanged
from mtp_runtime.layers.moe import HeldExperts, Moe
from mtp_runtime.models.model import Model, MtpModule

# Factors by which a half of eh_proj is tried: the sign, and powers of two, of which a factor
# between two is still mended by the nearer one.
HALF_FACTORS = (-1.0, 0.25, 0.5, 2.0, 4.0)
# Those of the fnuz form of fp8, whose codes are half of what the same bits are in the other.
SIZE_FACTORS = (0.5, 2.0)
OWN_NORMS = (
    Place("enorm", ("embedding_norm",)),
    Place("hnorm", ("hidden_norm",)),
    Place("the norm before the draft's head", ("head", "norm")),
)
PROJECTION = Place("eh_proj", ("projection",))


def norm_exchanges(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with two of its norms exchanged; enorm and hnorm, which `layout_variants` has, not
    with each other."""
    norms = {place.name: place.path for place in OWN_NORMS}
    if module.layer.input_norm is not None:
        norms["input_layernorm"] = ("layer", "input_norm")
    norms["post_attention_layernorm"] = ("layer", "post_norm")
    for one, other in [*combinations(norms, 2)][1:]:
        change = f"{one} and {other} are exchanged"
        yield replace(
            unchanged(module),
            name=change,
            change=change,
            cause=causes.swapped(one, other),
            module=exchanged(module, norms[one], norms[other]),
        )


def half_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with a half of its projection's columns multiplied by a factor."""
    middle = module.projection.weight.shape[1] // 2
    halves = {"embedding": slice(0, middle), "hidden": slice(middle, None)}
    for (half, columns), factor in ((h, f) for h in halves.items() for f in HALF_FACTORS):
        yield replace(
            unchanged(module),
            name=f"{half} half {factor:g}",
            change=f"the {half} half of eh_proj is multiplied by {factor:g}",
            cause=causes.half_scaled(half, 1 / factor),
            wrong=causes.WRONG_SIGN if factor < 0 else causes.times(1 / factor),
            module=replace(module, projection=columns_scaled(module.projection, columns, factor)),
            by_acceptance=True,
        )


def size_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with all of its linears multiplied by a factor; none of experts that are read as
    they are picked."""
    forward = module.layer.feed_forward
    if isinstance(forward, Moe) and not isinstance(forward.experts, HeldExperts):
        return
    for factor in SIZE_FACTORS:
        yield replace(
            unchanged(module),
            name=f"linears {factor:g}",
            change=f"every linear is multiplied by {factor:g}",
            cause=causes.linears_scaled(1 / factor),
            module=replace(
                module,
                projection=linears_scaled(module.projection, factor),
                layer=linears_scaled(module.layer, factor),
            ),
            by_acceptance=True,
        )


def single_tensor_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with one change of one of its tensors undone."""
    own = (*OWN_NORMS, PROJECTION)
    of_layer = [replace(p, path=("layer", *p.path)) for p in layer_places(module.layer)]
    for places, layer in ((own, ""), (of_layer, causes.MTP_LAYER)):
        for place, change, changed in tensor_variants(module, places):
            if place is PROJECTION and change.wrong == causes.COLUMN_HALVES:
                continue  # a reversed concatenation is a variant of its own
            name = place.adds if change.only_last else place.name
            yield replace(
                unchanged(module),
                name=change.done.format(place.name),
                change=change.done.format(place.name),
                cause=causes.of_tensor(name, layer, change.wrong),
                module=changed,
                by_acceptance=change.is_size,
                is_left_out=change.only_last,
                wrong=change.wrong,
            )
