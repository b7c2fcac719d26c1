"""Scales of what goes into experts, chosen once for each mixture and kept in a folder, and the
tensors beside them that they are folded into."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mtp_checkpoints.families.folds import Fold
from mtp_export import state_files
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.preflight import check_disk
from mtp_export.calibrate.linears import Linears
from mtp_export.calibrate.options import Method
from mtp_export.calibrate.rounding import Inputs, Rounder
from mtp_export.plan import OutputShard
from mtp_export.schemes.calibrated import Folded

SEARCHED = 8  # experts, spread over all, by which the scales of what goes into all are chosen


@dataclass(frozen=True)
class Scales:
    """Scales of a part's mixtures, by the name of what goes into their experts: each in a file of a
    folder. A method without scales has none."""

    linears: Linears
    method: Method
    folder: Path

    @cached_property
    def folds(self) -> dict[str, Fold]:
        """The fold of each mixture that takes scales (UnsupportedError as Linears.folds)."""
        return self.linears.folds if self.method is Method.AWQ and self.linears.steps else {}

    def path(self, name: str) -> Path:
        """File of the scales of what goes into experts."""
        return self.folder / f"{name}.pt"

    def is_missing(self, name: str) -> bool:
        """True where the scales of an input are still to be chosen."""
        return name in self.folds and not self.path(name).is_file()

    def of(self, name: str, inputs: Inputs) -> Tensor | None:
        """Return the exponents, int8 [K], of the scales of what goes into experts, chosen by its
        rows where they are missing; None for what takes none."""
        if name not in self.folds:
            return None
        if self.is_missing(name):
            every = [unit for unit in self.linears.of_experts if unit.input == name]
            some = every[:: -(-len(every) // SEARCHED)]
            exponents = Rounder(self.linears, self.method).exponents(some, inputs)
            if self.is_missing(name):  # no share may fold others than those that codes are under
                state_files.save(self.path(name), {"exponents": exponents})
        found: Tensor = state_files.load(self.path(name))["exponents"]
        return found

    @cached_property
    def folded(self) -> dict[str, Folded]:
        """Operations on tensors that are not rounded, by their names: scales are folded in."""
        offset, result = self.linears.plan.family.facts.norm_offset, dict[str, Folded]()
        for name, fold in self.folds.items():
            path = self.path(name)
            result |= {own: Folded(path) for own in fold.multiplied}
            result[fold.divided] = Folded(path, divides=True, offset=offset)
        return {name: own for name, own in result.items() if name not in self.linears.steps}


def unlinked(plan: BundlePlan, names: Collection[str]) -> BundlePlan:
    """Return a plan that writes the shards of some weights, where it would link them
    (ResourceError without the disk space)."""
    weight_of = plan.stored.weight_of

    def written(shard: OutputShard) -> OutputShard:
        firsts = (weight_of.get(step.inputs[0]) for step in shard.steps)
        found = any(own is not None and own.weight.name in names for own in firsts)
        return replace(shard, linked_from=None) if found else shard

    parts = [replace(part, shards=tuple(map(written, part.shards))) for part in plan.parts]
    plan = replace(plan, parts=tuple(parts))
    check_disk(plan.options.output_dir, plan.disk_bytes)
    return plan
