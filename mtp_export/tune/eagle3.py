"""An EAGLE-3 draft, trained from nothing over the inputs of three of the target's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.errors import UnsupportedError
from mtp_export.families.base import Role, TensorSpec
from mtp_export.families.deepseek_v3 import DeepseekV3Family
from mtp_export.families.eagle3 import Eagle3Family, eagle3_config, usual_taps
from mtp_export.families.modules import weight_name
from mtp_export.tune.draft import DraftType, Outputs, Sizes
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Rows
from mtp_export.tune.writing import Output, SourceBundle
from mtp_export.verify.evidence.corpus import Drafts, judge
from mtp_runtime.layers.attention import Attention
from mtp_runtime.models.eagle3 import Eagle3Module, eagle3_module
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Head, Model, States, TorchExecution
from mtp_runtime.teacher_forcing import DraftInputs, draft_states
from mtp_runtime.training.recursion import draft_outputs

METHOD = "eagle3"


@dataclass(frozen=True)
class Eagle3Draft:
    """All weights of a draft with a head of its own over the target's whole vocabulary."""

    target: Model
    family: Eagle3Family
    parameters: Mapping[str, nn.Parameter]

    @classmethod
    def open(cls, options: TuneOptions, source: SourceBundle) -> Eagle3Draft:
        """Make a draft; its head begins as the target's, its norm likewise."""
        opened = open_model(options.bundle, LoadOptions(options.device))
        target = opened.builder.model(TorchExecution(), None, layers=0)
        family, random = _family(source), torch.Generator()
        random.manual_seed(options.train.seed)
        names, head = family.modules, target.head
        first = {weight_name(names.norm): head.norm.weight, weight_name(names.head): _matrix(head)}
        parameters = {
            spec.name: nn.Parameter(
                first.get(spec.name, _first_value(spec, random)).to(options.place, copy=True)
            )
            for spec in _trained_specs(family)
        }
        return cls(target, family, parameters)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def outputs(self, batch: Batch, depths: int) -> Outputs:
        module, taps = self.module, batch.hidden[:, :-1]
        fed = module.combined(taps.flatten(0, 1)).view(*taps.shape[:2], -1)
        tokens = F.pad(batch.tokens, (0, depths - 1))
        head = self.parameters[weight_name(self.family.modules.head)]
        return Outputs(draft_outputs(_Chain(module), fed, tokens, depths), head.to(self.device))

    @torch.no_grad()
    def judged(self, rows: Rows, depths: int) -> Drafts:
        module, anchors = self.module, rows.texts.anchors()
        fed = module.combined(rows.hidden.to(self.device))
        states = draft_states((module,), DraftInputs(rows.texts, fed, anchors), depths)
        return judge((module,), texts=rows.texts, anchors=anchors, states=states)

    def plan(self, output: Output) -> BundlePlan:
        tensors = {name: p.detach().bfloat16() for name, p in self.parameters.items()}
        return output.plan_draft(METHOD, _config(output.source), tensors)

    @property
    def module(self) -> Eagle3Module:
        """The draft with the values that its parameters have now."""
        return eagle3_module(self.family, self.parameters, self.target)


@dataclass(frozen=True)
class _Chain:
    """A draft whose layer takes the same at every position."""

    module: Eagle3Module

    @property
    def head(self) -> Head:
        return self.module.head

    @property
    def attention(self) -> Attention:
        return self.module.attention

    def entering(
        self, next_tokens: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.module.entering(next_tokens, hidden)

    def leaving(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.module.leaving(residual, attended)

    def recycled(self, x: Tensor, normed: Tensor) -> Tensor:
        return self.module.recycled(x, normed)


def _matrix(head: Head) -> Tensor:
    """Return the matrix [vocab, d] of a head."""
    return head.linear.matrix(torch.float32).t().contiguous()


def _first_value(spec: TensorSpec, random: torch.Generator) -> Tensor:
    """Return ones for a norm, for a matrix what keeps the size of its input."""
    if spec.role is Role.NORM:
        return torch.ones(spec.shape)
    return torch.randn(spec.shape, generator=random) / math.sqrt(spec.shape[-1])


def _config(source: SourceBundle) -> dict[str, Any]:
    config = source.main.config
    return eagle3_config(config, usual_taps(config["num_hidden_layers"]), config["vocab_size"])


def _family(source: SourceBundle) -> Eagle3Family:
    """Return the draft's family (UnsupportedError for a target without latent attention)."""
    if not isinstance(source.stored.family, DeepseekV3Family):
        raise UnsupportedError(
            "EAGLE-3 drafts are trained for targets with latent attention",
            where=source.folder,
            expected="a DeepSeek-V3",
            found=source.main.config.get("model_type"),
        )
    return Eagle3Family.from_config(_config(source))


def _trained_specs(family: Eagle3Family) -> list[TensorSpec]:
    """Return the tensors of a draft that shares the target's embedding and vocabulary."""
    left_out = (Role.EMBEDDING, Role.VOCABULARY)
    return [spec for spec in family.tensors.values() if spec.role not in left_out]


def _fed(model: Model, states: States) -> Tensor:
    assert states.taps is not None, "the model is tapped for the draft"
    return states.taps


def _sizes(options: TuneOptions, source: SourceBundle) -> Sizes:
    elements = sum(math.prod(spec.shape) for spec in _trained_specs(_family(source)))
    return Sizes(parameters=elements, trained=elements, used=elements)


EAGLE3 = DraftType(Eagle3Draft.open, fed=_fed, sizes=_sizes, taps=usual_taps)
