"""Interface of drafts that can be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor, nn

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.tune.drafts import DRAFTS
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Fed, Rows
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.tune.writing import Output
from mtp_export.verify.evidence.corpus import Drafts


class Chains(Protocol):
    """Chains of drafts from slots of a batch, under autograd, grown by one draft at a time."""

    def drafts(self, starts: Tensor) -> Tensor:
        """Grow the chains that start at these slots [n], of all b * s of the batch, ascending and
        among those of the call before; returns the draft's outputs [n, d] after its norm."""


class TrainedDraft(Protocol):
    """A draft that is being trained."""

    @property
    def device(self) -> torch.device:
        """Device that computes."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All that training changes."""

    @property
    def head(self) -> Tensor:
        """The head [vocab, d] that reads its outputs."""

    def chains(self, batch: Batch) -> Chains:
        """Return the chains of a batch with the values that the parameters have now."""

    def judged(self, rows: Rows, depths: int) -> Drafts:
        """Return what the draft proposes along the generated ends of texts, at most so deep."""

    def plan(self, output: Output) -> BundlePlan:
        """Plan the bundle with the draft as it is now."""


@dataclass(frozen=True)
class Sizes:
    """Elements of a draft: all, those that are trained, and those that one row goes through.

    stored_bytes: held of what is stored. new_bytes: of a draft that comes beside the MTP part, as
    it is written; 0 for one that is written in its place.
    """

    parameters: int
    trained: int
    used: float
    stored_bytes: int = 0
    new_bytes: int = 0


@dataclass(frozen=True)
class DraftType:
    """A kind of draft that is trained.

    open: makes it for the bundle that is tuned. fed: what it is fed of the target's states.
    taps: layers of a target of so many whose inputs it takes. sizes: by config.json alone; refuses
    a bundle that it is not trained for (UnsupportedError). low_rank: changes of low rank may be
    trained instead of whole matrices.
    """

    open: Callable[[TuneOptions, SourceBundle], TrainedDraft]
    fed: Callable[[SourceBundle], Fed]
    sizes: Callable[[TuneOptions, SourceBundle], Sizes]
    taps: Callable[[int], tuple[int, ...]] = lambda layers: ()
    low_rank: bool = False


def draft_type(name: str) -> DraftType:
    """Return the kind of draft of a key of DRAFTS."""
    draft: DraftType = import_module(DRAFTS[name]).DRAFT
    return draft
