"""Builds a model out of named tensors, by its description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.spec import Input, ModelSpec, MtpSpec
from mtp_checkpoints.formats import unquantized
from mtp_runtime.config import ModelConfig
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear, dense
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.execution import Execution, Head, Outputs
from mtp_runtime.models.layer_loader import LayerLoader
from mtp_runtime.models.layer_types import layer_type, load_layer
from mtp_runtime.models.model import Model, MtpModule


def config_for(spec: ModelSpec, tokens: int | None) -> ModelConfig:
    """Return the facts of a model for contexts of at most some tokens; None: as many as its layers
    usually take.

    Raises UnsupportedError for a part that the runtime does not compute, UsageError for more tokens
    than the model has positions.
    """
    config = ModelConfig.of(spec)
    for part in spec.parts:
        usual = layer_type(part).usual_context
        if tokens is None and usual is not None:
            config = config.bounded(*usual(part))
    return config if tokens is None else config.for_contexts(tokens)


@dataclass(frozen=True)
class ModelBuilder:
    """Loads the parts of a model; each method loads what it returns."""

    source: WeightSource
    spec: ModelSpec
    config: ModelConfig

    @cached_property
    def loader(self) -> LayerLoader:
        """Loader of the model's layers."""
        return LayerLoader(self.source, self.config.norm_eps, self.config.max_positions)

    def model(
        self, execution: Execution, contract: MtpContract | None, layers: int | None = None
    ) -> Model:
        """Load the model, with its first `layers` main layers where that is given, and with its
        MTP modules where there is a contract for them."""
        source, spec = self.source, self.spec
        embedding = source.embedding(weight_name(spec.embedding))
        head = Head(self.loader.norm(spec.norm), Outputs(source.head(spec.head), execution))
        count = self.config.layers if layers is None else layers
        main = execution.layers(map(self.layer, range(count)))
        modules: tuple[MtpModule, ...] = ()
        if contract is not None and source.has_mtp:
            model = Model(self.config, embedding, main, head)
            modules = tuple(self.mtp_module(model, mtp, contract) for mtp in spec.mtp)
        return Model(self.config, embedding=embedding, layers=main, head=head, mtp_modules=modules)

    def layer(self, index: int) -> DecoderLayer:
        """Load one main layer."""
        return load_layer(self.loader, self.spec.layers[index])

    def mtp_module(self, main: Model, mtp: MtpSpec, contract: MtpContract) -> MtpModule:
        """Load one MTP layer; embedding and head are the main model's own where they are equal."""
        source = self.source
        local = weight_name(mtp.modules.embedding)
        tied = source.is_tied(local, weight_name(self.spec.embedding))
        embedding = main.embedding if tied else source.embedding(local)
        head = replace(main.head, outputs=self._mtp_outputs(main, mtp))
        return self.mtp_layer(mtp, embedding, head=head, contract=contract)

    def mtp_layer(
        self, mtp: MtpSpec, embedding: Embedding, *, head: Head, contract: MtpContract
    ) -> MtpModule:
        """Load what an MTP layer has beside an embedding and a head, of which the norm is its
        own."""
        names, loader = mtp.modules, self.loader
        return MtpModule(
            embedding=embedding,
            embedding_norm=loader.norm(names.embedding_norm),
            hidden_norm=loader.norm(names.hidden_norm),
            projection=self._projection(mtp),
            layer=load_layer(loader, mtp.layer),
            head=replace(head, norm=loader.norm(names.head_norm)),
            contract=contract,
            usual_contract=self.spec.usual_contract,
            execution=head.execution,
        )

    def _projection(self, mtp: MtpSpec) -> Linear:
        """Load an MTP layer's projection of [embedding | hidden state], in this order."""
        source, module = self.source, mtp.modules.projection
        if mtp.inputs == (Input.EMBEDDING, Input.HIDDEN):
            return source.linear(module)
        matrix = dense(source.weight(module), source.dtype)
        swapped = torch.cat(matrix.chunk(2, dim=1)[::-1], dim=1)
        return Linear.build(unquantized(swapped), source.dtype, source.keep_dense)

    def _mtp_outputs(self, main: Model, mtp: MtpSpec) -> Outputs:
        local, of_main = weight_name(mtp.modules.head), weight_name(self.spec.head)
        if self.source.is_tied(local, of_main):
            return main.head.outputs
        return Outputs(self.source.head(mtp.modules.head), main.execution)
