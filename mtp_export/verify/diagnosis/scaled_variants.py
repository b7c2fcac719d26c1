"""Variants of an MTP module whose norms or matrices are off by a number: 1 + w, a sign, a factor.

Most of them make the module more or less certain of what it drafts anyway, which its scores show as
a gain: they explain a fault only where more drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.diagnosis.changed_weight import columns_scaled
from mtp_export.verify.diagnosis.tensor_variants import Place, layer_places, tensor_variants
from mtp_export.verify.diagnosis.variants import Variant, unchanged
from mtp_runtime.models.model import Model, MtpModule

# Factors by which a half of eh_proj is tried: the sign, and powers of two, of which a factor
# between two is still mended by the nearer one.
HALF_FACTORS = (-1.0, 0.25, 0.5, 2.0, 4.0)


def layer_norm_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with the two norms of its layer exchanged; none for a layer without both."""
    layer = module.layer
    if layer.input_norm is None:
        return
    exchanged = replace(layer, input_norm=layer.post_norm, post_norm=layer.input_norm)
    yield replace(
        unchanged(module),
        name="layer norms",
        change="input_layernorm and post_attention_layernorm are exchanged",
        cause=causes.LAYER_NORMS_SWAPPED.format(layer=causes.MTP_LAYER),
        module=replace(module, layer=exchanged),
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
            module=replace(module, projection=columns_scaled(module.projection, columns, factor)),
            by_acceptance=True,
        )


def single_tensor_variants(model: Model, module: MtpModule) -> Iterator[Variant]:
    """The module with one change of one of its tensors undone."""
    own = (
        Place("enorm", ("embedding_norm",)),
        Place("hnorm", ("hidden_norm",)),
        Place("the norm before the draft's head", ("head", "norm")),
        Place("eh_proj", ("projection",)),
    )
    of_layer = [replace(p, path=("layer", *p.path)) for p in layer_places(module.layer)]
    for places, layer in ((own, ""), (of_layer, causes.MTP_LAYER)):
        for place, change, changed in tensor_variants(module, places):
            name = place.adds if change.only_last else place.name
            yield replace(
                unchanged(module),
                name=change.done.format(place.name),
                change=change.done.format(place.name),
                cause=causes.of_tensor(name, layer, change.wrong),
                module=changed,
                by_acceptance=change.is_size,
            )
