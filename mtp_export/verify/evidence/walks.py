"""The walks over the bytes of a bundle's parts, which all checks share that look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.disk_queue import DiskQueue, disk_depth
from mtp_checkpoints.sources.remote_source import READERS
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.bundle.options import Share
from mtp_export.progress import ShowProgress
from mtp_export.verify.check import Level
from mtp_export.verify.evidence.findings import Findings, Known
from mtp_export.verify.evidence.mlp_notes import Router, looked_into, mlps_of
from mtp_export.verify.evidence.part_walk import PartWalk, WalkPlan, known_of, recorded_checksums
from mtp_export.verify.evidence.parts import PartLayout
from mtp_export.verify.evidence.source_weights import SourceWeights
from mtp_export.verify.options import VerifyOptions


@dataclass(frozen=True)
class Walks:
    """One walk over each opened part, on first use.

    It reads the tensors whose checksums are compared and, from level weights on, all weights,
    beside the source's, but for those that were read elsewhere. recorded: entries of the parts in
    the manifest. identity: mark of bundle and source as they are now. source: None without one that
    can be followed.
    """

    options: VerifyOptions
    checkpoints: Mapping[str, Checkpoint]
    layouts: Sequence[PartLayout]
    recorded: Mapping[str, Any]
    source: SourceWeights | None
    identity: str
    show_progress: ShowProgress
    _plans: dict[str, WalkPlan] = field(default_factory=dict)
    _known: dict[str, Known] = field(default_factory=dict)
    _walks: dict[str, PartWalk] = field(default_factory=dict)

    def of(self, part: str) -> PartWalk:
        """Return the findings of a part's walk. Raises IoError for a tensor of the part that cannot
        be read."""
        if part not in self._walks:
            plan, known = self.plan(part), self._known.get(part, Known())
            if self.findings is not None:
                known |= self.findings.of(part)
            self._walks[part] = plan.joined(known, self._walked(part, plan.without(known)))
        return self._walks[part]

    def share(self, part: str, share: Share) -> tuple[WalkPlan, Known]:
        """Read a share of what the walk over a part would; return what was read, and the findings
        (IoError)."""
        plan = self.plan(part).of_share(share)
        return plan, known_of(self._walked(part, plan))

    def learn(self, part: str, known: Known) -> None:
        """Take findings about a part that was read elsewhere: its walk does not read them again."""
        self._known[part] = self._known.get(part, Known()) | known

    def checksums(self, part: str) -> Mapping[str, str]:
        """Checksums of a part's tensors that the manifest records, in file order."""
        return recorded_checksums(self.checkpoints[part], self.recorded.get(part) or {})

    def plan(self, part: str) -> WalkPlan:
        """The tensors that the walk over a part reads."""
        if part not in self._plans:
            self._plans[part] = self._planned(part)
        return self._plans[part]

    @cached_property
    def findings(self) -> Findings | None:
        """Findings of shares in --workdir about bundle and source as they are now; None without a
        folder."""
        workdir = self.options.workdir
        return None if workdir is None else Findings(workdir, self.identity)

    def _walked(self, part: str, plan: WalkPlan) -> PartWalk:
        place = self.checkpoints[part].path
        workers = 0 if isinstance(place, Path) and plan.is_small else self.options.workers
        with (
            self.show_progress(f"{part}: tensors", plan.size_bytes) as progress,
            DiskQueue(_depth_of(place)) as queue,
        ):
            return plan.run(workers, queue, progress)

    def _planned(self, part: str) -> WalkPlan:
        weights, noted = list[WeightOnDisk](), dict[str, Router | None]()
        if self.options.level >= Level.WEIGHTS:
            for layout in self.layouts:
                if layout.name == part:
                    apart = layout.apart
                    weights = weights_on_disk(apart.stored, apart.checkpoint.tensors)
                    noted = looked_into(weights, mlps_of(apart.stored.family, weights))
        hashed = self.checksums(part) if self.options.checksums else {}
        read = {tensor.name: tensor for weight in weights for tensor in weight.tensors}
        tensors = self.checkpoints[part].written
        sources = [self.source.find(weight) if self.source else None for weight in weights]
        return WalkPlan(
            weights=list(zip(weights, sources, strict=True)),
            # A weight may be read in another form than its file has it in.
            others=[tensors[name] for name in hashed if read.get(name) != tensors[name]],
            noted=noted,
        )


def _depth_of(place: Place) -> int:
    """Reads that are best under way at once."""
    return disk_depth(place) if isinstance(place, Path) else READERS
