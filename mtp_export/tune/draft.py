"""Interface of drafts that can be trained; DRAFTS has them by the name that --draft takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Rows
from mtp_export.verify.evidence.corpus import Drafts
from mtp_runtime.loading.weight_source import WeightSource


@dataclass(frozen=True)
class Outputs:
    """Normed outputs [b, s, d] of a draft by depth, and the head [vocab, d] that reads them."""

    normed: list[Tensor]
    head: Tensor


class TrainedDraft(Protocol):
    """A draft that is being trained."""

    @property
    def source(self) -> WeightSource:
        """The bundle's weights, in the forms that they are stored in."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All that training changes."""

    def outputs(self, batch: Batch, depths: int) -> Outputs:
        """Return the draft's outputs at every slot of a batch, under autograd."""

    def judged(self, rows: Rows, depths: int) -> Drafts:
        """Return what the draft proposes along the generated ends of texts."""

    def trained(self, name: str) -> Tensor:
        """Return a weight as it is to be written, before it is rounded, float32."""

    @property
    def names(self) -> list[str]:
        """Released names of the weights that are trained."""
