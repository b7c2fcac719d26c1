"""MTP layers without any routed expert, in the form that the main layers' experts have: what a
family has by default need not be what this checkpoint has."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.parts import Moe
from mtp_checkpoints.families.stored_names import as_any_expert
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_export.verify.check import Problem
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.files.astray import each


def lost_experts(
    stored: StoredModel, mtp: Collection[str], main: Collection[str]
) -> Iterator[Problem]:
    """Yield the problems of layers with no expert, one by one or fused. stored: what the MTP part
    is to hold. mtp and main: the names of its tensors and of the main model's."""
    main_layers = [(one.feed_forward, one.feed_forward_prefix) for one in stored.family.layers]
    as_fused = any(_are_fused(moe, prefix, main) for moe, prefix in main_layers)
    for module in stored.family.mtp:
        moe, prefix = module.layer.feed_forward, module.layer.feed_forward_prefix
        if not isinstance(moe, Moe) or not any(n.startswith(f"{prefix}.") for n in mtp):
            continue
        experts = f"{prefix}.{moe.names.experts}."
        missing = [
            tensor.name
            for one in stored.weights.values()
            if one.weight.role is Role.ROUTED_EXPERT and one.weight.name.startswith(experts)
            for tensor in one.tensors
        ]
        fused = moe.names.fused.under(prefix).every
        if not missing or any(name.startswith(experts) or name in fused for name in mtp):
            continue
        names = dict.fromkeys(fused if as_fused else map(as_any_expert, missing))
        yield from each(missing, causes.no_expert(prefix, moe.experts, [*names]))


def _are_fused(moe: object, prefix: str, names: Collection[str]) -> bool:
    every = moe.names.fused.under(prefix).every if isinstance(moe, Moe) else ()
    return any(name in names for name in every)
