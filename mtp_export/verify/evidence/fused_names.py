"""The fused tensors that single experts are stored in: what is wrong with one is told by the names
that experts have one by one, and by that of the tensor which is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtp_checkpoints.families.single_experts import single_experts
from mtp_export.verify.check import FUSED_IN, Item, Status
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
