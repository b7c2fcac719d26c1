"""Norms that were folded into the linears behind them, as tools that rotate weights (QuaRot,
SpinQuant) leave them: each multiplies by 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.signs import in_layer
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_export.progress import counted
from mtp_export.verify.check import Item, measured
from mtp_export.verify.evidence.parts import PartLayout
from mtp_export.verify.evidence.weight_facts import WeightFacts

ITEM = "norms folded into linears"


def folded_norms(layout: PartLayout, facts: Sequence[WeightFacts]) -> frozenset[str]:
    """Return the names of the norms of a main model of which all of a kind, in every layer,
    multiply by 1, and of those behind the layers that do so too. Where one layer's alone do, they
    were lost."""
    neutral = 1.0 - layout.stored.family.facts.norm_offset
    kinds: dict[str, list[WeightFacts]] = defaultdict(list)
    behind = list[WeightFacts]()
    for fact in facts:
        spec = fact.weight.stored.weight
        if spec.role is Role.NORM and len(spec.shape) == 1:
            layer, kind = in_layer(spec.name)
            (kinds[kind] if layer else behind).append(fact)
    found = [
        fact
        for ones in kinds.values()
        if len(ones) > 1 and all(_is(one, neutral) for one in ones)
        for fact in ones
    ]
    also = [one for one in behind if found and _is(one, neutral)]
    return frozenset(one.weight.name for one in (*found, *also))


def folded_with(
    main: frozenset[str], layout: PartLayout, facts: Sequence[WeightFacts]
) -> frozenset[str]:
    """Return the names of a module's norms that multiply by 1 beside those of a main model that
    were folded, main: all that have the name of one of these do so, and so may its others."""
    neutral = 1.0 - layout.stored.family.facts.norm_offset
    kinds = {kind for layer, kind in map(in_layer, main) if layer}
    norms = [one for one in facts if one.weight.stored.weight.role is Role.NORM]
    alike = [one for one in norms if in_layer(one.weight.stored.weight.name)[1] in kinds]
    if not alike or not all(_is(one, neutral) for one in alike):
        return frozenset()
    return frozenset(one.weight.name for one in norms if _is(one, neutral))


def folded_item(part: str, names: frozenset[str], count: int) -> Item:
    """Return what is no failure: the norms that were folded, out of so many of a part."""
    figure = f"{len(names)} of {counted(count, 'norm')} multiply by 1, as rotations leave them"
    if part == MAIN:
        figure = f"{figure}: an MTP layer is to be of the same rotation"
    return measured(f"{part}: {ITEM}", figure, {})


def _is(fact: WeightFacts, value: float) -> bool:
    found = fact.statistics
    return found.is_sound and found.is_constant and found.root_mean_square == value
