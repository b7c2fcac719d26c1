"""Tensors of MTP modules that no engine looks for, beside those that are missing: the same under
other names, or another model's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.base import TensorSpec
from mtp_checkpoints.families.name_parts import module_of
from mtp_checkpoints.families.other_kinds import of_another_kind
from mtp_checkpoints.families.renamed import OtherNames
from mtp_export.verify.check import Item, Problem
from mtp_export.verify.diagnosis.causes import presence as causes
from mtp_export.verify.diagnosis.causes.names import under_other_names
from mtp_export.verify.files.main_shapes import exchanged, of_other_shapes

_FLAT = "flat_param"  # of FSDP, one for all parameters of a module


def with_pairs(item: Item, others: OtherNames | None) -> Item:
    """An item whose data has the name that each renamed tensor should have."""
    pairs = {} if others is None else {"renamed": dict(others.pairs)}
    return replace(item, data={**item.data, **pairs})


@dataclass(frozen=True)
class Strange:
    """Tensors of MTP modules that no engine looks for, beside those that are missing.

    names: both. wanted: the modules' weights by the names of `as_weight`. every: all tensors. mtp:
    the modules'. width: that of the hidden state. wrong: as of
    of_other_shapes.
    """

    names: Sequence[str]
    wanted: Mapping[str, TensorSpec]
    every: Mapping[str, TensorInfo]
    mtp: Mapping[str, TensorInfo]
    width: int | None
    wrong: Collection[str] = ()

    def problems(self, others: OtherNames | None) -> list[Problem]:
        """others: those that are what is missing, under other names."""
        if (flat := next(filter(_is_flat, self.mtp), None)) is not None:
            return each([flat, *self.names], causes.flattened(flat))
        if pairs := exchanged(self.wanted, self.mtp):
            return pairs
        if others is not None and others.is_sure:
            return self._under_other_names(others)
        if kinds := of_another_kind(self.wanted, self.mtp):
            own = (causes.of_another_kind(one.part, one.wanted, one.found) for one in kinds)
            return each([*self.names, *self.mtp], "; ".join(own))
        if others is not None:
            return self._under_other_names(others)
        unlike = of_other_shapes(self.wanted, self.every, self.mtp, self.width, self.wrong)
        subjects = [one.subject for one in unlike]  # and all else of another model's layer
        return each([*subjects, *self.names, *self.mtp], unlike[0].words) if unlike else []

    def _under_other_names(self, others: OtherNames) -> list[Problem]:
        """With what lies beside them, as their scales."""
        modules = {module_of(name) for name in others.pairs}
        beside = (name for name in self.every if module_of(name) in modules)
        return each([*others.pairs, *beside, *self.names], under_other_names(others))


def _is_flat(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_") == _FLAT


def each(names: Iterable[str], words: str) -> list[Problem]:
    """The same words for several tensors: what else is said of these follows from it."""
    return [Problem(name, words) for name in dict.fromkeys(names)]
