"""Tensors of MTP modules that no engine looks for, beside those that are missing: the same under
other names, or another model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.other_names import OtherNames, of_another_kind
from mtp_checkpoints.families.signs import hidden_size
from mtp_export.verify.check import Item, Problem
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.files.main_shapes import of_other_shapes

if TYPE_CHECKING:
    from mtp_export.verify.files.presence import Found


def with_pairs(item: Item, others: OtherNames | None) -> Item:
    """An item whose data has the name that each renamed tensor should have."""
    pairs = {} if others is None else {"renamed": dict(others.pairs)}
    return replace(item, data={**item.data, **pairs})


def astray(
    found: Found, tensors: Mapping[str, TensorInfo], others: OtherNames | None
) -> list[Problem]:
    """Tensors of the modules that no engine looks for, in the place of those that are missing.
    others: those that are those, under other names."""
    wanted = found.wanted_names
    if others is not None and others.is_sure:
        return each([*others.pairs, *found.astray], causes.other_names(others))
    if kinds := of_another_kind(wanted, tensors):
        words = "; ".join(causes.of_another_kind(one.part, one.wanted, one.found) for one in kinds)
        return each(found.astray, words)
    if others is not None:
        return each([*others.pairs, *found.astray], causes.other_names(others))
    return of_other_shapes(wanted, found.tensors, tensors, hidden_size(found.config))


def each(names: Iterable[str], words: str) -> list[Problem]:
    """The same words for several tensors: what else is said of these follows from it."""
    return [Problem(name, words) for name in dict.fromkeys(names)]
