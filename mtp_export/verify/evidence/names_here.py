"""Names that a checkpoint has for what a failure is about: the fused tensors that single experts
are stored in, and those for what is told of a module by DeepSeek-V3's names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mtp_checkpoints.families.single_experts import single_experts
from mtp_checkpoints.families.spec import ModelSpec
from mtp_export.verify.check import FUSED_IN, NAMES_HERE, Item, Status
from mtp_export.verify.evidence.parts import PartLayout


def with_fused_names(layouts: Iterable[PartLayout], item: Item) -> Item:
    """Return an item with the fused tensors that its subjects are stored in, if it failed."""
    if item.status is not Status.FAIL:
        return item
    subjects, found = set(item.subjects), list[str]()
    for layout in layouts:
        stored = layout.checkpoint.tensors
        for fused, own in single_experts(layout.stored.family).items():
            if fused in stored and not subjects.isdisjoint(own):
                found.append(fused)
    if not found:
        return item
    return replace(item, data={**item.data, FUSED_IN: list(dict.fromkeys(found))})


def with_module_names(family: ModelSpec, item: Item) -> Item:
    """Return an item with the names that the family's first module has for those of DeepSeek-V3 in
    its cause, if it failed and they are others."""
    if item.status is not Status.FAIL or not family.mtp:
        return item
    own = family.mtp[0].modules
    names = {"eh_proj": own.projection, "enorm": own.embedding_norm, "hnorm": own.hidden_norm}
    here = {
        name: module
        for name, module in names.items()
        if re.search(rf"\b{name}\b", item.cause) and module and not module.endswith(f".{name}")
    }
    if not here:
        return item
    words = ", ".join(f"{name} is {module}" for name, module in here.items())
    return replace(item, data={**item.data, NAMES_HERE: f"here {words}"})
