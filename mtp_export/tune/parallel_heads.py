"""Parallel heads, trained from nothing over the target's last hidden state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from mtp_checkpoints.families.parallel_heads import Body, HeadsLayout
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.tune.draft import DraftType, Sizes
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Fed, Rows
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.tune.writing import Output
from mtp_export.verify.evidence.corpus import Drafts, judge_normed
from mtp_runtime.models.execution import TorchExecution
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.models.parallel_heads import FfnHeads, StoredHeads, run_blocks

METHOD = "parallel_heads"
INNER = 8  # rows of a block's first matrix, over the hidden size


@dataclass
class HeadsChains:
    """Chains of which every head drafts one, all from the state [T, d] that they start at."""

    heads: FfnHeads
    hidden: Tensor
    _depth: int = field(default=0, init=False)

    def drafts(self, starts: Tensor) -> Tensor:
        blocks = self.heads.blocks[self._depth : self._depth + 1]
        self._depth += 1
        return run_blocks(blocks, self.hidden.index_select(0, starts))[0]


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
        opened = open_model(options.bundle, LoadOptions(options.device, with_mtp=False))
        target = opened.model(TorchExecution(), layers=0)
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

    def chains(self, batch: Batch) -> HeadsChains:
        return HeadsChains(self._heads, batch.hidden.flatten(0, 1))

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
    facts = source.family.facts
    return HeadsLayout(
        heads=options.train.k,
        body=Body.FFN,
        hidden=facts.hidden,
        vocab=facts.vocab,
        inner=INNER * facts.hidden,
    )


def _sizes(options: TuneOptions, source: SourceBundle) -> Sizes:
    elements = sum(map(math.prod, _layout(options, source).shapes().values()))
    used, new_bytes = elements / options.train.k, torch.bfloat16.itemsize * elements
    return Sizes(parameters=elements, trained=elements, used=used, new_bytes=new_bytes)


DRAFT = DraftType(HeadsDraft.open, fed=lambda source: Fed.AFTER_NORM, sizes=_sizes)
