"""Models whose experts are stored fused, as if they were stored one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtp_checkpoints.families.parts.feed_forward import Moe
from mtp_checkpoints.families.spec import LayerSpec, ModelSpec


def single_experts(
    family: ModelSpec, *, main: bool = True, mtp: bool = True
) -> dict[str, tuple[str, ...]]:
    """Return per fused tensor of main layers, of MTP layers or of both the weights of single
    experts that it holds, in the order of their rows."""
    found: dict[str, tuple[str, ...]] = {}
    for moe, prefix in _mixtures(family, main=main, mtp=mtp):
        found |= moe.apart(prefix)
    return found


def has_fused_codes(family: ModelSpec, *, main: bool = True, mtp: bool = True) -> bool:
    """Return whether experts of main layers, of MTP layers or of either are stored fused in fp8."""
    return any(moe.fused_scales for moe, _ in _mixtures(family, main=main, mtp=mtp))


def taken_fused(family: ModelSpec, target: str) -> Iterator[str]:
    """Yield the fused tensors of experts that a target reads fused alone."""
    for moe, prefix in _mixtures(family, main=True, mtp=True):
        if target in moe.names.takes_fused:
            yield from moe.apart(prefix)


def _mixtures(family: ModelSpec, *, main: bool, mtp: bool) -> Iterator[tuple[Moe, str]]:
    layers = [
        *(family.layers if main else ()),
        *(module.layer for module in family.mtp if mtp),
    ]
    for layer in layers:
        if isinstance(layer.feed_forward, Moe):
            yield layer.feed_forward, layer.feed_forward_prefix


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
