"""The bundle's MTP module, trained from what the bundle stores of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtp_export.errors import UnsupportedError
from mtp_export.families.contract import MtpContract
from mtp_export.tune.draft import Outputs
from mtp_export.tune.row_store import Batch
from mtp_export.tune.rows import Rows
from mtp_export.verify.evidence.corpus import Drafts, judge
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.builder import ModelBuilder
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Head, MtpModule, TorchExecution
from mtp_runtime.teacher_forcing import DraftInputs, draft_states
from mtp_runtime.training.recursion import draft_outputs, expanded
from mtp_runtime.training.weights import TrainedWeights, WeightOptions, trainable_names


@dataclass(frozen=True)
class MtpDraft:
    """The weights of an MTP layer as parameters, between an embedding and a head that stay."""

    builder: ModelBuilder
    embedding: Embedding
    own_head: Head
    contract: MtpContract
    weights: TrainedWeights
    dtype: torch.dtype

    @classmethod
    def open(cls, bundle: Path, device: str, options: WeightOptions) -> MtpDraft:
        """Open the MTP module of a bundle.

        Raises what open_model does, and UnsupportedError for several modules, for weights that
        nothing writes and for an attention that is not trained.
        """
        opened = open_model(bundle, LoadOptions(device, dequantize_at_load=False))
        builder = opened.builder
        model = builder.model(TorchExecution(), opened.contract, layers=0)
        if len(model.mtp_modules) != 1:
            raise UnsupportedError(
                "Drafts of one MTP module are trained",
                where=bundle,
                expected="one MTP layer",
                found=len(model.mtp_modules),
            )
        (module,) = model.mtp_modules
        expanded(module.layer.attention)
        names = trainable_names(builder.source)
        weights = TrainedWeights(builder.source, names, options)
        return cls(
            builder,
            embedding=module.embedding,
            own_head=module.head,
            contract=module.contract,
            weights=weights,
            dtype=options.dtype,
        )

    @property
    def source(self) -> WeightSource:
        return self.builder.source

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.weights.parameters

    @property
    def names(self) -> list[str]:
        return self.weights.names

    def trained(self, name: str) -> Tensor:
        return self.weights.unrounded(name)

    def outputs(self, batch: Batch, depths: int) -> Outputs:
        tokens = F.pad(batch.tokens, (0, depths - 1))
        return Outputs(
            draft_outputs(self.module(self.dtype), batch.hidden[:, :-1], tokens, depths),
            self.head,
        )

    @torch.no_grad()
    def judged(self, rows: Rows, depths: int) -> Drafts:
        module, anchors = self.module(torch.float32), rows.texts.anchors()
        inputs = DraftInputs(rows.texts, rows.hidden.to(self.source.device), anchors)
        states = draft_states((module,), inputs, depths)
        return judge((module,), texts=rows.texts, anchors=anchors, states=states)

    def module(self, dtype: torch.dtype) -> MtpModule:
        """Return the module with the values that its parameters have now, in a dtype."""
        values = self.weights.values(dtype)
        source = replace(self.source, values=values, dtype=dtype, keep_dense=True)
        builder = replace(self.builder, source=source)
        layer = builder.family.mtp_layers.start
        return builder.mtp_layer(layer, self.embedding, head=self.own_head, contract=self.contract)

    @cached_property
    def head(self) -> Tensor:
        """The head [vocab, d]."""
        return self.own_head.linear.matrix(torch.float32).t().contiguous()
