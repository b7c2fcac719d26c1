"""Decoder layers compiled for a CPU: a pass over all layers is one call.

Launching an operation costs more than computing it when a model is small or rows are few, so a
team of threads runs the whole stack in one launch. Each row is computed in one fixed order: its
bits depend on neither its batch nor the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.panel_forms import Panel, form_of
from mtp_kernels.cpu.team import process_team
from mtp_kernels.decoder import (
    DecoderConfig,
    DeltaConfig,
    LayerKind,
    LayerShard,
    LayerWeights,
    Matrix,
    OffloadedLayer,
    RecursionParts,
    Rope,
)
from mtp_kernels.decoder.checks import (
    check_layers,
    check_parts,
    check_pass,
    check_recursion,
    check_weights,
)
from mtp_kernels.decoder.compiled_cpu.attention import Scratch
from mtp_kernels.decoder.compiled_cpu.delta import DeltaDecoder
from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache
from mtp_kernels.decoder.compiled_cpu.offloaded import (
    OffloadedDecoder,
    OffloadedNets,
    PackedOffloaded,
    pack_offloaded,
)
from mtp_kernels.decoder.compiled_cpu.packing import FLOATS, Packer
from mtp_kernels.decoder.compiled_cpu.passes import Norm, Projection, best_product, whole_product
from mtp_kernels.decoder.compiled_cpu.recursion import (
    Chains,
    Drafting,
    Module,
    most_parts,
    no_batch,
    no_drafting,
    run,
)
from mtp_kernels.decoder.compiled_cpu.scratch import make_scratch, planned
from mtp_kernels.decoder.compiled_cpu.sharded import PackedShard, ShardedDecoder, pack_shard
from mtp_kernels.decoder.compiled_cpu.weights import (
    PackedLayer,
    PackedLayers,
    inner_sizes,
    pack_layer,
    table_of,
)
from mtp_kernels.tensor_checks import check_shape


class Backend:
    """Packs the parts of one model side by side into one arena."""

    def __init__(
        self,
        dtype: torch.dtype,
        activations: torch.dtype = torch.float32,
        arena: Arena | None = None,
    ) -> None:
        self._packer = Packer(arena or Arena(), dtype, activations)

    def runs(self, kind: LayerKind) -> bool:
        """Return True for latent or grouped-query attention, or a gated delta net, with a dense or
        mixture-of-experts MLP."""
        rows = kind.feed_forward in ("dense", "sigmoid_moe", "softmax_moe")
        return kind.attention in ("mla", "gqa", "gated_delta") and rows

    def pack(self, weights: LayerWeights) -> PackedLayer:
        """Pack a layer."""
        check_weights(weights)
        return pack_layer(weights, self._packer)

    def decoder(self, config: DecoderConfig, layers: Sequence[PackedLayer], rope: Rope) -> Decoder:
        """Join layers."""
        return Decoder(config, layers, rope)

    def delta_decoder(self, config: DeltaConfig, layers: Sequence[PackedLayer]) -> DeltaDecoder:
        """Join layers with gated delta nets."""
        return DeltaDecoder(config, layers)

    def pack_shard(self, part: LayerShard) -> PackedShard:
        """Pack one process's part of a layer."""
        check_weights(part.weights)
        return pack_shard(part, self._packer)

    def sharded_decoder(
        self, config: DecoderConfig, layers: Sequence[PackedShard], rope: Rope
    ) -> ShardedDecoder:
        """Join parts of layers."""
        return ShardedDecoder(config, layers, rope)

    def expert_cache(self, size_bytes: int, picked: int, pool: Executor) -> ExpertCache:
        """Make a cache of routed experts, of which a row picks so many in a layer; pool: threads
        that read them."""
        return ExpertCache(size_bytes, self._packer, picked, pool)

    def pack_offloaded(
        self, layer: LayerWeights | OffloadedLayer, cache: ExpertCache
    ) -> PackedOffloaded:
        """Pack a layer, but for routed experts that stay in their files."""
        if isinstance(layer, LayerWeights):
            return PackedOffloaded(self.pack(layer))
        check_weights(layer.weights)
        return pack_offloaded(layer, self._packer, cache)

    def offloaded_decoder(
        self,
        config: DecoderConfig,
        layers: Sequence[PackedOffloaded],
        rope: Rope,
        cache: ExpertCache,
    ) -> OffloadedDecoder:
        """Join layers, some of which have routed experts in a cache."""
        return OffloadedDecoder(config, layers, rope, cache)

    def offloaded_nets(
        self, config: DeltaConfig, layers: Sequence[PackedOffloaded], cache: ExpertCache
    ) -> OffloadedNets:
        """Join layers with gated delta nets, some of which have routed experts in a cache."""
        return OffloadedNets(config, layers, cache)

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """Return an RMS norm."""
        return Norm(weight, eps)

    def projection(self, matrix: Matrix) -> Projection:
        """Pack a matrix."""
        return Projection.packed(matrix, self._packer)

    def recursion(self, parts: RecursionParts) -> Recursion:
        """Return the recursion of parts that this backend packed."""
        return Recursion(parts)


class Decoder(PackedLayers[PackedLayer]):
    """Some packed layers of a model, run by one launch."""

    def __init__(self, config: DecoderConfig, layers: Sequence[PackedLayer], rope: Rope) -> None:
        super().__init__(config, layers, rope)
        check_layers(config, layers)
        self.table, self._no_drafting = table_of(layers), no_drafting()
        self.multiplications = sum(layer.multiplications for layer in layers)
        self._experts, self._inner = inner_sizes(layers, config.routing.experts_per_token)

    def __call__(
        self,
        x: torch.Tensor,
        layout: BatchLayout,
        kv_cache: torch.Tensor,
        attention_input: torch.Tensor | None = None,
    ) -> None:
        """Run the stream x [T, d] through the layers, in place."""
        check_pass(
            self.config,
            self.layers,
            x=x,
            layout=layout,
            kv_cache=kv_cache,
            attention_input=attention_input,
        )
        batch, parts = planned(layout, kv_cache.shape[2], self.rotation, self.sizes.heads)
        team = process_team()
        team.run(
            run,
            team.threads_for(len(x) * self.multiplications),
            self.table,
            self.sizes,
            batch,
            kv_cache.flatten(1, 2).numpy(),
            self.scratch(len(x), parts, attention_input),
            x.numpy(),
            self._no_drafting,
        )

    def scratch(
        self, count: int, parts: int, attention_input: torch.Tensor | None = None
    ) -> Scratch:
        """Return memory for a pass over a number of rows, and parts of attention."""
        inner = count * self._experts, self._inner
        return make_scratch(
            self.config, count, parts=parts, inner=inner, attention_input=attention_input
        )


class Recursion:
    """Greedy drafts of all requests in one launch."""

    def __init__(self, parts: RecursionParts) -> None:
        inputs, projection = parts.inputs, parts.inputs.projection
        norms = inputs.embedding_norm, inputs.hidden_norm, parts.head_norm
        if not (
            isinstance(parts.decoder, Decoder)
            and all(isinstance(norm, Norm) for norm in norms)
            and isinstance(projection, Projection | None)
            and isinstance(parts.head, Projection)
        ):
            raise TypeError("recursion: expected parts of compiled_cpu, found another backend's")
        check_parts(parts.decoder.config, parts.decoder.layers[0], parts)
        check_shape("tokens", parts.tokens, (parts.head.outputs,), (torch.int64,))
        self._decoder, self._embedding = parts.decoder, parts.embedding.contiguous()
        table = self._embedding
        self._module = Module(
            embedding=Panel(table.data_ptr(), table.shape[1], form_of(FLOATS[table.dtype])),
            embedding_norm=inputs.embedding_norm.weight,
            hidden_norm=inputs.hidden_norm.weight,
            projection=Panel(0, 0, 0) if projection is None else projection.first_panel,
            head_norm=parts.head_norm.weight,
            head=parts.head.first_panel,
            tokens=parts.tokens.numpy(),
            eps=parts.head_norm.eps,
            recycles_normed=parts.recycles_normed,
            normed_residual=inputs.normed_residual,
        )
        products = (parts.decoder, parts.head, *([projection] if projection else ()))
        self._multiplications = sum(product.multiplications for product in products)

    def __call__(
        self,
        x: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """Draft counts[i] tokens for each row of x [b, d], which is overwritten."""
        decoder, team = self._decoder, process_team()
        check_recursion(
            decoder.config, x, spans=(starts, counts), page_table=page_table, kv_cache=kv_cache
        )
        chains = Chains(
            starts=np.array(starts),
            counts=np.array(counts),
            page_table=page_table.numpy(),
            page=kv_cache.shape[2],
            rope=decoder.rotation,
        )
        threads, most = team.threads_for(sum(counts) * self._multiplications), counts[0]
        drafts = np.empty((len(counts), most), np.int64)
        team.run(
            run,
            threads,
            decoder.table,
            decoder.sizes,
            no_batch(chains),
            kv_cache.flatten(1, 2).numpy(),
            decoder.scratch(len(counts), most_parts(chains, decoder.sizes.heads)),
            x.numpy(),
            Drafting(
                self._module,
                chains,
                best=best_product(len(self._module.tokens), threads, len(counts)),
                stream=whole_product(x.numpy()),
                tokens=drafts,
            ),
        )
        return [row[:count] for row, count in zip(drafts.tolist(), counts, strict=True)]
