"""Models whose experts are stored fused, as if they were stored one by one."""

from __future__ import annotations

from dataclasses import replace

from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec


def single_experts(
    family: ModelSpec, *, main: bool = True, mtp: bool = True
) -> dict[str, tuple[str, ...]]:
    """Return per fused tensor of main layers, of MTP layers or of both the weights of single
    experts that it holds, in the order of their rows."""
    layers = [
        *(family.layers if main else ()),
        *(module.layer for module in family.mtp if mtp),
    ]
    found: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        if isinstance(layer.feed_forward, Moe):
            found |= layer.feed_forward.apart(layer.feed_forward_prefix)
    return found


def with_single_experts(family: ModelSpec) -> ModelSpec:
    """Return the model with the experts of all layers stored one by one; the model itself where
    none are fused."""
    if not single_experts(family):
        return family
    layers = tuple(map(_one_by_one, family.layers))
    mtp = tuple(replace(module, layer=_one_by_one(module.layer)) for module in family.mtp)
    return replace(family, layers=layers, mtp=mtp)


def _one_by_one(layer: LayerSpec) -> LayerSpec:
    moe = layer.feed_forward
    return replace(layer, feed_forward=moe.one_by_one) if isinstance(moe, Moe) else layer
