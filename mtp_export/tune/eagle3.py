"""An EAGLE-3 draft, trained from nothing over the inputs of three of the target's layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role, TensorSpec, weight_name
from mtp_checkpoints.families.eagle3 import Eagle3Family, eagle3_config, usual_taps
from mtp_checkpoints.families.parts import Mla, SparseMla
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.tune.draft import DraftType, Sizes
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Fed, Rows
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.tune.writing import Output
from mtp_export.verify.evidence.corpus import Drafts, judge
from mtp_runtime.models.eagle3 import Eagle3Module, eagle3_module
from mtp_runtime.models.execution import Head, TorchExecution
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.teacher_forcing import DraftInputs, draft_states
from mtp_runtime.training.recursion import RecursiveChains

METHOD = "eagle3"


@dataclass(frozen=True)
class Eagle3Draft:
    """All weights of a draft with a head of its own over the target's whole vocabulary."""

    target: Model
    family: Eagle3Family
    parameters: Mapping[str, nn.Parameter]

    @classmethod
    def open(cls, options: TuneOptions, source: SourceBundle) -> Eagle3Draft:
        """Make a draft that repeats the target's own choice at first: it hands on the last tap, and
        its norm and head begin as the target's."""
        opened = open_model(options.bundle, LoadOptions(options.device, with_mtp=False))
        target = opened.model(TorchExecution(), layers=0)
        family, random = _family(source), torch.Generator()
        random.manual_seed(options.train.seed)
        head = target.head
        first = {
            weight_name(family.norm): head.norm.weight,
            weight_name(family.head): _matrix(head),
            weight_name(family.projection): _last_tap(family),
        }
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

    @property
    def head(self) -> Tensor:
        return self.parameters[weight_name(self.family.head)].to(self.device)

    def chains(self, batch: Batch) -> RecursiveChains:
        module, shape = self.module, batch.tokens.shape
        fed = module.combined(batch.hidden.flatten(0, 1)).view(*shape, -1)
        return RecursiveChains(module, fed, batch.tokens)

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


def _matrix(head: Head) -> Tensor:
    """Return the matrix [vocab, d] of a head."""
    return head.linear.matrix(torch.float32).t().contiguous()


def _last_tap(family: Eagle3Family) -> Tensor:
    """Return the projection [d, taps * d] of the taps to the last one of them."""
    others = torch.zeros(family.hidden, (family.tap_count - 1) * family.hidden)
    return torch.cat([others, torch.eye(family.hidden)], dim=1)


def _first_value(spec: TensorSpec, random: torch.Generator) -> Tensor:
    """Return ones for a norm, zeros for what the layer adds, else what keeps the input's size."""
    if spec.role is Role.NORM:
        return torch.ones(spec.shape)
    if spec.module.endswith(("o_proj", "down_proj")):
        return torch.zeros(spec.shape)
    return torch.randn(spec.shape, generator=random) / math.sqrt(spec.shape[-1])


def _config(source: SourceBundle) -> dict[str, Any]:
    config = source.main.config
    return eagle3_config(config, usual_taps(config["num_hidden_layers"]), config["vocab_size"])


def _family(source: SourceBundle) -> Eagle3Family:
    """Return the draft's family (UnsupportedError for a target without latent attention)."""
    if not isinstance(source.family.layers[0].attention, Mla | SparseMla):
        raise UnsupportedError(
            "EAGLE-3 drafts are trained for targets with latent attention",
            where=source.folder,
            expected="a DeepSeek-V3",
            found=source.main.config.get("model_type"),
        )
    layers = source.main.config["num_hidden_layers"]
    if list(usual_taps(layers)) != sorted({*usual_taps(layers)}):
        raise UnsupportedError(
            "EAGLE-3 drafts take the inputs of layers 2, L/2 and L-3, which must be three layers",
            where=source.folder,
            expected="a target of 7 layers or more",
            found=layers,
        )
    return Eagle3Family.from_config(_config(source))


def _trained_specs(family: Eagle3Family) -> list[TensorSpec]:
    """Return the tensors of a draft that shares the target's embedding and vocabulary."""
    left_out = (Role.EMBEDDING, Role.VOCABULARY)
    return [spec for spec in family.tensors.values() if spec.role not in left_out]


def _sizes(options: TuneOptions, source: SourceBundle) -> Sizes:
    elements = sum(math.prod(spec.shape) for spec in _trained_specs(_family(source)))
    new_bytes = torch.bfloat16.itemsize * elements
    return Sizes(parameters=elements, trained=elements, used=elements, new_bytes=new_bytes)


DRAFT = DraftType(Eagle3Draft.open, fed=lambda source: Fed.TAPS, sizes=_sizes, taps=usual_taps)
