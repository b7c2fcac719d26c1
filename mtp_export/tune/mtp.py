"""The bundle's MTP module, trained from what the bundle stores of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import Role, TensorSpec
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.parts import HeadGatedGqa, Moe, SlidingGqa, UngatedMoe
from mtp_checkpoints.formats.base import ReadOnlyFormat
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.tune.draft import DraftType, Sizes
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Fed, Rows
from mtp_export.tune.source_bundle import SourceBundle
from mtp_export.tune.writing import Output
from mtp_export.verify.evidence.corpus import Drafts, judge
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.models.execution import Head, TorchExecution
from mtp_runtime.models.load import DTYPES, LoadOptions, OpenedModel, open_model
from mtp_runtime.models.model import MtpModule
from mtp_runtime.teacher_forcing import DraftInputs, draft_states
from mtp_runtime.training.recursion import RecursiveChains, expanded
from mtp_runtime.training.weights import (
    TrainedWeights,
    WeightOptions,
    is_trained,
    trainable_names,
)


@dataclass(frozen=True)
class MtpDraft:
    """The weights of an MTP layer as parameters, between an embedding and a head that stay."""

    opened: OpenedModel
    embedding: Embedding
    own_head: Head
    contract: MtpContract
    weights: TrainedWeights
    dtype: torch.dtype

    @classmethod
    def open(cls, options: TuneOptions, source: SourceBundle) -> MtpDraft:
        """Open the MTP module of a bundle. Raises what open_model does, and UnsupportedError for an
        attention that is not trained."""
        opened = open_model(options.bundle, LoadOptions(options.device, dequantize_at_load=False))
        (module,) = opened.model(TorchExecution(), layers=0).mtp_modules
        expanded(module.attention)
        weights = WeightOptions(
            lora_rank=options.train.lora_rank,
            scale_rule=source.scale_rule,
            place=options.place,
            seed=options.train.seed,
        )
        return cls(
            opened,
            embedding=module.embedding,
            own_head=module.head,
            contract=module.contract,
            weights=TrainedWeights(opened.source, trainable_names(opened.source), weights),
            dtype=DTYPES[options.train.dtype],
        )

    @property
    def device(self) -> torch.device:
        return self.opened.source.device

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.weights.parameters

    def chains(self, batch: Batch) -> RecursiveChains:
        return RecursiveChains(self.module(self.dtype), batch.hidden, batch.tokens)

    @torch.no_grad()
    def judged(self, rows: Rows, depths: int) -> Drafts:
        module, anchors = self.module(torch.float32), rows.texts.anchors()
        inputs = DraftInputs(rows.texts, rows.hidden.to(self.device), anchors)
        states = draft_states((module,), inputs, depths)
        return judge((module,), texts=rows.texts, anchors=anchors, states=states)

    def plan(self, output: Output) -> BundlePlan:
        return output.plan_mtp(self.weights.names, self.weights.unrounded)

    def module(self, dtype: torch.dtype) -> MtpModule:
        """Return the module with the values that its parameters have now, in a dtype."""
        values = self.weights.values(dtype)
        source = replace(self.opened.source, values=values, dtype=dtype, keep_dense=True)
        opened = replace(self.opened, source=source)
        (mtp,) = opened.spec.mtp
        return opened.mtp_layer(mtp, self.embedding, head=self.own_head, contract=self.contract)

    @cached_property
    def head(self) -> Tensor:
        """The head [vocab, d]."""
        return self.own_head.linear.matrix(torch.float32).t().contiguous()


def _fed(source: SourceBundle) -> Fed:
    return Fed(source.family.mtp_contract.target_hidden)


def _sizes(options: TuneOptions, source: SourceBundle) -> Sizes:
    """Return the sizes of the MTP layer; of routed experts a row goes through a few.

    Raises UnsupportedError for several layers, and for weights in a format that nothing writes.
    """
    family, rank = source.family, options.train.lora_rank
    _check(source)
    (mtp,) = family.mtp
    moe = mtp.layer.feed_forward
    experts = 1.0
    if isinstance(moe, Moe | UngatedMoe):
        experts = moe.router.routing.experts_per_token / moe.experts
    specs = [spec for spec in family.tensors.values() if is_trained(spec)]
    shares = (experts if spec.role is Role.ROUTED_EXPERT else 1.0 for spec in specs)
    return Sizes(
        parameters=sum(prod(spec.shape) for spec in specs),
        trained=_trained_elements(specs, rank),
        used=sum(share * prod(spec.shape) for share, spec in zip(shares, specs, strict=True)),
        stored_bytes=0 if rank is None else _stored_bytes(source),
    )


def _check(source: SourceBundle) -> None:
    if len(source.family.mtp_layers) != 1:
        raise UnsupportedError(
            "Drafts of one MTP module are trained",
            where=source.folder,
            expected="one MTP layer",
            found=len(source.family.mtp_layers),
        )
    attention = source.family.mtp[0].layer.attention
    if isinstance(attention, SlidingGqa | HeadGatedGqa) and attention.window is not None:
        raise UnsupportedError(
            "MTP layers with a sliding window are not trained",
            where=source.folder,
            expected="attention to all tokens before a query",
            found=source.main.config.get("model_type"),
            todo="Use the module as it is, or --draft parallel_heads",
        )
    for one in source.stored.weights.values():
        if is_trained(one.weight) and one.format.of_whole_matrix:
            raise UnsupportedError(
                f"MTP layers in {one.storage} are not trained: linears that engines join have one"
                " number of the whole matrix, which each step would change",
                where=source.folder,
                expected="an MTP part in bf16, fp8, int8 or int4",
                found=f"{one.weight.name} in {one.storage}",
                todo="Tune a bundle in the source's precision, and quantize what comes of it",
            )
        if is_trained(one.weight) and isinstance(one.format, ReadOnlyFormat):
            raise UnsupportedError(
                f"Tensor {one.weight.name} is in a format that only others' tools write",
                where=source.folder,
                found=str(one.storage),
                todo="Give the MTP part a precision of mtp-export quantize first",
            )


def _trained_elements(specs: Iterable[TensorSpec], rank: int | None) -> int:
    return sum(
        prod(spec.shape)
        if rank is None or len(spec.shape) != 2 or spec.role is Role.ROUTER
        else min(rank, *spec.shape) * sum(spec.shape)
        for spec in specs
    )


def _stored_bytes(source: SourceBundle) -> int:
    """Return the bytes of the trained weights as they are stored."""
    weight_of = source.stored.weight_of
    tensors = source.mtp.tensors.values()
    return sum(t.size_bytes for t in tensors if is_trained(weight_of[t.name].weight))


DRAFT = DraftType(MtpDraft.open, fed=_fed, sizes=_sizes, low_rank=True)
