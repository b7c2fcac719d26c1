"""Builds a model out of named tensors. Its family gives the names.

A new model derives from ModelBuilder, adds its attention and router, and is one line of MODELS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtp_checkpoints.families.contract import MtpContract
from mtp_checkpoints.families.modules import (
    DecoderFamily,
    MlpModules,
    MoeModules,
    MtpModules,
    weight_name,
)
from mtp_runtime.config import ModelConfig
from mtp_runtime.layers.attention import Attention
from mtp_runtime.layers.decoder_layer import DecoderLayer, FeedForward
from mtp_runtime.layers.embedding import Embedding
from mtp_runtime.layers.linear import Linear, Weight, stack
from mtp_runtime.layers.moe import Mlp, Moe, Router
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.layers.tensor_parallel import ParallelMoe
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.model import Execution, Head, Model, MtpModule


@dataclass(frozen=True)
class ModelBuilder(ABC):
    """Parts that most decoder-only models share; each method loads what it returns."""

    source: WeightSource
    family: DecoderFamily
    config: ModelConfig

    @abstractmethod
    def attention(self, layer: int) -> Attention:
        """Load the attention of one layer, main or MTP."""

    @abstractmethod
    def router(self, names: MoeModules) -> Router:
        """Load the router of a mixture of experts."""

    @property
    def shared_experts(self) -> int:
        """Number of shared experts that a sparse layer stores side by side, as one MLP."""
        return 1

    def model(
        self, execution: Execution, contract: MtpContract | None, layers: int | None = None
    ) -> Model:
        """Load the model, with its first `layers` main layers where that is given, and with its
        MTP modules where there is a contract for them."""
        source, names = self.source, self.family.modules
        embedding = source.embedding(weight_name(names.embedding))
        head = Head(self.norm(names.norm), source.head(names.head), execution)
        count = self.config.layers if layers is None else layers
        main = execution.layers(map(self.layer, range(count)))
        modules: tuple[MtpModule, ...] = ()
        if contract is not None and source.has_mtp:
            model = Model(self.config, embedding, main, head)
            modules = tuple(
                self.mtp_module(model, layer, contract) for layer in self.family.mtp_layers
            )
        return Model(self.config, embedding=embedding, layers=main, head=head, mtp_modules=modules)

    def layer(self, index: int) -> DecoderLayer:
        """Load one layer, main or MTP."""
        names = self.family.layer_modules(index)
        return DecoderLayer(
            input_norm=self.norm(names.input_norm),
            attention=self.attention(index),
            post_norm=self.norm(names.post_norm),
            feed_forward=self.feed_forward(names.feed_forward),
        )

    def mtp_module(self, main: Model, index: int, contract: MtpContract) -> MtpModule:
        """Load one MTP layer; embedding and head are the main model's own where they are equal."""
        source, names = self.source, self.family.mtp_modules(index)
        own = weight_name(names.embedding)
        tied = source.is_tied(own, weight_name(self.family.modules.embedding))
        embedding = main.embedding if tied else source.embedding(own)
        head = replace(main.head, linear=self._mtp_head(main, names))
        return self.mtp_layer(index, embedding, head=head, contract=contract)

    def mtp_layer(
        self, index: int, embedding: Embedding, *, head: Head, contract: MtpContract
    ) -> MtpModule:
        """Load what an MTP layer has beside an embedding and a head, of which the norm is its
        own."""
        names = self.family.mtp_modules(index)
        return MtpModule(
            embedding=embedding,
            embedding_norm=self.norm(names.embedding_norm),
            hidden_norm=self.norm(names.hidden_norm),
            projection=self.source.linear(names.projection),
            layer=self.layer(index),
            head=replace(head, norm=self.norm(names.head_norm)),
            contract=contract,
            usual_contract=self.family.usual_contract,
            execution=head.execution,
        )

    def _mtp_head(self, main: Model, names: MtpModules) -> Linear:
        own, of_main = weight_name(names.head), weight_name(self.family.modules.head)
        if self.source.is_tied(own, of_main):
            return main.head.linear
        return self.source.head(names.head)

    def norm(self, module: str) -> RmsNorm:
        """Load an RMS norm."""
        return RmsNorm.build(self.source.tensor(weight_name(module)), self.config.norm_eps)

    def stacked(self, *modules: str, rows: range | None = None) -> Linear:
        """Load linears of the same input as one, or the same rows of each."""
        return self.joined(*(self.source.weight(module, rows) for module in modules))

    def joined(self, *parts: Weight) -> Linear:
        """Join loaded weights of the same input into one linear."""
        return Linear.build(stack(parts), self.source.dtype, self.source.keep_dense)

    def feed_forward(self, names: MlpModules | MoeModules) -> FeedForward:
        """Load a dense or a sparse feed-forward layer."""
        if isinstance(names, MoeModules):
            return self.moe(names)
        return self.split_mlp(names, range(self.source.shape(names.gate)[0]))

    def mlp(self, names: MlpModules) -> Mlp:
        """Load a whole gated MLP."""
        return Mlp(self.stacked(names.gate, names.up), self.source.linear(names.down))

    def split_mlp(self, names: MlpModules, inner: range, *, joins: bool = True) -> Mlp:
        """Load some inner values of a gated MLP, of which every rank has a part.

        joins False: its output is the own summand of the whole.
        """
        parts = [
            range(inner.start + part.start, inner.start + part.stop)
            for part in self.source.split.nonempty_parts(len(inner), "inner values")
        ]
        own = parts[self.source.split.rank]
        gate_up = self.stacked(names.gate, names.up, rows=own)
        if not joins:
            return Mlp(gate_up, self.source.linear(names.down, columns=own))
        return Mlp(gate_up, self.source.row_parallel(names.down, parts))

    def moe(self, names: MoeModules) -> Moe | ParallelMoe:
        """Load a mixture of experts, routed ones first; of those every rank has some, whole."""
        source, parallel = self.source, self.source.parallel
        parts = source.split.parts(len(names.experts))
        own = parts[source.split.rank]
        shared = tuple(self._shared(names.shared))
        experts = source.experts(names.experts[own.start : own.stop], self.mlp, shared)
        if parallel.group.is_one:
            return Moe(self.router(names), experts, len(shared))
        for number, expert in enumerate(names.experts):
            if number not in own:
                source.elsewhere(expert)
        return ParallelMoe(
            self.router(names), experts, shared=len(shared), parts=tuple(parts), parallel=parallel
        )

    def _shared(self, names: MlpModules | None) -> Iterator[Mlp]:
        """Yield the shared experts one by one, which lie side by side."""
        if names is None:
            return
        inner = self.source.shape(names.gate)[0] // self.shared_experts
        for number in range(self.shared_experts):
            own = range(number * inner, (number + 1) * inner)
            yield self.split_mlp(names, own, joins=not self.source.parallel.reduces)
