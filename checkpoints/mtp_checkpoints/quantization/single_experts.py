"""Folders with fused experts as if they held them one by one, as what multiplies them does."""

from __future__ import annotations

from mtp_checkpoints.families.parts.feed_forward import fused_scale
from mtp_checkpoints.families.single_experts import (
    has_fused_codes,
    single_experts,
    with_single_experts,
)
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.tensors.experts_apart import experts_apart
from mtp_checkpoints.tensors.reader import Checkpoint


def one_by_one(checkpoint: Checkpoint, stored: StoredModel) -> tuple[Checkpoint, StoredModel]:
    """Return a checkpoint, whose tensors are those that it must hold, and what it holds, as if
    fused experts were stored one by one; both as they are where none is fused."""
    fused = single_experts(stored.family)
    family = with_single_experts(stored.family)
    names = (name for spec in stored.specs for name in fused.get(spec.name, ()))
    specs = [family.tensors[name] for name in names]
    if not specs:
        return checkpoint, stored
    others = {*fused, *map(fused_scale, fused)}
    kept = stored.of_tensors(lambda spec: spec.name not in others)
    quantization = stored.quantization if has_fused_codes(stored.family) else None
    singles = StoredModel(family, quantization, specs, ()).reread(quantization, str)
    apart = StoredModel(
        family,
        stored.quantization,
        specs=[*kept.specs, *specs],
        kinds=[*kept.kinds, *singles.kinds],
    )
    return experts_apart(checkpoint, stored.family), apart
