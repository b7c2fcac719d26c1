"""Parallel heads, trained from nothing over the target's last hidden state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.families.parallel_heads import Body, HeadsLayout
from mtp_export.tune.draft import DraftType, Outputs, Sizes
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Rows
from mtp_export.tune.writing import Output, SourceBundle
from mtp_export.verify.evidence.corpus import Drafts, judge_normed
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Model, States, TorchExecution
from mtp_runtime.models.parallel_heads import FfnHeads, StoredHeads

METHOD = "parallel_heads"
INNER = 8  # rows of a block's first matrix, over the hidden size


@dataclass(frozen=True)
class HeadsDraft:
    """One residual block of two matrices for each head, under the target's own projection.

    Source: Stern et al., Blockwise Parallel Decoding (arXiv 1811.03115).
    """

    target: Model
    layout: HeadsLayout
    parameters: Mapping[str, nn.Parameter]

    @classmethod
    def open(cls, options: TuneOptions, source: SourceBundle) -> HeadsDraft:
        """Make k heads that repeat the target's own choice at first."""
        opened = open_model(options.bundle, LoadOptions(options.device))
        target = opened.builder.model(TorchExecution(), None, layers=0)
        layout, random = _layout(options, source), torch.Generator()
        random.manual_seed(options.train.seed)
        parameters = {
            name: nn.Parameter(_first_value(name, shape, random).to(options.place))
            for name, shape in layout.shapes().items()
        }
        return cls(target, layout, parameters)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def outputs(self, batch: Batch, depths: int) -> Outputs:
        hidden = batch.hidden[:, :-1]
        bodies = self._heads.bodies(hidden.flatten(0, 1))[:depths]
        return Outputs([body.view_as(hidden) for body in bodies], self.head)

    @torch.no_grad()
    def judged(self, rows: Rows, depths: int) -> Drafts:
        anchors = rows.texts.anchors()
        bodies = self._heads.bodies(rows.hidden[anchors.rows].to(self.device))
        head = self.target.head
        bodies = bodies[:depths]
        heads = [head] * len(bodies)
        return judge_normed(heads, texts=rows.texts, anchors=anchors, normed=list(bodies))

    def plan(self, output: Output) -> BundlePlan:
        tensors = {name: p.detach().bfloat16() for name, p in self.parameters.items()}
        return output.plan_draft(METHOD, self.layout.config(), tensors)

    @property
    def _heads(self) -> FfnHeads:
        return StoredHeads(self.layout, self.parameters).ffn(self.target)

    @cached_property
    def head(self) -> Tensor:
        """The target's head [vocab, d]."""
        return self.target.head.linear.matrix(torch.float32).t().contiguous()


def _first_value(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return a random first matrix; the second one and biases are zero."""
    if name.endswith("up.weight"):
        return torch.randn(shape, generator=random) / math.sqrt(shape[-1])
    return torch.zeros(shape)


def _layout(options: TuneOptions, source: SourceBundle) -> HeadsLayout:
    family = source.family
    return HeadsLayout(
        heads=options.train.k,
        body=Body.FFN,
        hidden=family.hidden,
        vocab=family.vocab,
        inner=INNER * family.hidden,
    )


def _fed(model: Model, states: States) -> Tensor:
    return states.after


def _sizes(options: TuneOptions, source: SourceBundle) -> Sizes:
    elements = sum(map(math.prod, _layout(options, source).shapes().values()))
    return Sizes(parameters=elements, trained=elements, used=elements / options.train.k)


PARALLEL_HEADS = DraftType(HeadsDraft.open, fed=_fed, sizes=_sizes)
