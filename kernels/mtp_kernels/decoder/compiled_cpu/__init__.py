"""Decoder layers compiled for a CPU: a pass over all layers is one call.

Launching an operation costs more than computing it when a model is small or rows are few, so a
team of threads runs the whole stack in one launch. Each row is computed in one fixed order: its
bits depend on neither its batch nor the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.cpu.memory import Arena
from mtp_kernels.cpu.team import process_team
from mtp_kernels.cpu.vectors import PANEL, Panel
from mtp_kernels.decoder.checks import (
    check_config,
    check_layers,
    check_parts,
    check_pass,
    check_recursion,
    check_weights,
)
from mtp_kernels.decoder.compiled_cpu.attention import Scratch
from mtp_kernels.decoder.compiled_cpu.passes import (
    Product,
    best_product,
    run_norm,
    run_project,
    whole_product,
)
from mtp_kernels.decoder.compiled_cpu.recursion import (
    Chains,
    Drafting,
    Module,
    most_parts,
    no_batch,
    no_drafting,
    run,
)
from mtp_kernels.decoder.compiled_cpu.rows import panels_of
from mtp_kernels.decoder.compiled_cpu.scratch import make_scratch, planned
from mtp_kernels.decoder.compiled_cpu.sharded import PackedShard, ShardedDecoder, pack_shard
from mtp_kernels.decoder.compiled_cpu.weights import (
    PackedLayer,
    Packer,
    pack_layer,
    sizes_of,
    table_of,
)
from mtp_kernels.decoder.interface import (
    DecoderConfig,
    LayerKind,
    LayerWeights,
    Matrix,
    RecursionParts,
)
from mtp_kernels.decoder.sharded import LayerShard
from mtp_kernels.tensor_checks import check_shape


class Backend:
    """Packs the parts of one model side by side into one arena."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._packer = Packer(Arena(), dtype)

    def runs(self, kind: LayerKind) -> bool:
        """Return True for latent or grouped-query attention with a dense or mixture-of-experts
        MLP."""
        return kind.attention in ("mla", "gqa") and kind.feed_forward in ("dense", "sigmoid_moe")

    def pack(self, weights: LayerWeights) -> PackedLayer:
        """Pack a layer."""
        check_weights(weights)
        return pack_layer(weights, self._packer)

    def decoder(
        self,
        config: DecoderConfig,
        layers: Sequence[PackedLayer],
        *,
        inv_freq: torch.Tensor,
        attention_scaling: float,
    ) -> Decoder:
        """Join layers."""
        check_config(config, inv_freq)
        check_layers(config, layers)
        return Decoder(
            config,
            layers,
            entry_bytes=self._packer.entry_bytes,
            inv_freq=inv_freq,
            attention_scaling=attention_scaling,
        )

    def pack_shard(self, part: LayerShard) -> PackedShard:
        """Pack one process's part of a layer."""
        check_weights(part.weights)
        return pack_shard(part, self._packer)

    def sharded_decoder(
        self,
        config: DecoderConfig,
        layers: Sequence[PackedShard],
        *,
        inv_freq: torch.Tensor,
        attention_scaling: float,
    ) -> ShardedDecoder:
        """Join parts of layers."""
        return ShardedDecoder(
            config,
            layers,
            entry_bytes=self._packer.entry_bytes,
            inv_freq=inv_freq,
            attention_scaling=attention_scaling,
        )

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """Return an RMS norm."""
        return Norm(weight, eps)

    def projection(self, matrix: Matrix) -> Projection:
        """Pack a matrix."""
        return Projection(matrix, self._packer)

    def recursion(self, parts: RecursionParts) -> Recursion:
        """Return the recursion of parts that this backend packed."""
        return Recursion(parts)


class Decoder:
    """Some packed layers of a model, with the rotary positions that they share.

    entry_bytes: of the packed matrices, as in a Panel. inv_freq [r/2] float32: radians per position
    of each pair; attention_scaling multiplies every rotation.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[PackedLayer],
        *,
        entry_bytes: int,
        inv_freq: torch.Tensor,
        attention_scaling: float,
    ) -> None:
        self.config = config
        self.sizes = sizes_of(config, entry_bytes)
        self.table = table_of(layers)
        self.rope = inv_freq.contiguous().numpy(), np.float32(attention_scaling)
        self.multiplications = sum(tensor.numel() for packed in layers for tensor in packed.tensors)
        self.layers, self._no_drafting = tuple(layers), no_drafting()
        self._experts = max(
            layer.experts_per_row(config.routing.experts_per_token) for layer in layers
        )
        self._inner = max(panels_of(layer.inner) * PANEL for layer in layers)

    def __len__(self) -> int:
        return len(self.layers)

    def part(self, first: int, stop: int) -> Decoder:
        """Return layers [first, stop) as a decoder of their own."""
        inv_freq, scaling = torch.from_numpy(self.rope[0]), float(self.rope[1])
        return Decoder(
            self.config,
            self.layers[first:stop],
            entry_bytes=self.sizes.entry_bytes,
            inv_freq=inv_freq,
            attention_scaling=scaling,
        )

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
        batch, parts = planned(layout, kv_cache.shape[2], self.rope, self.sizes.heads)
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


class Norm:
    """RMS norm with a weight [d]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.float().contiguous().numpy()
        self.eps = np.float32(eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norm rows [T, d]."""
        out = torch.empty_like(x)
        process_team().run(run_norm, 1, x.numpy(), self.weight, self.eps, out.numpy())
        return out


class Projection:
    """y = x @ matrix.T for a packed matrix [out, in]."""

    def __init__(self, matrix: Matrix, packer: Packer) -> None:
        self.outputs, inputs = matrix.shape
        self._packed = packer.matrix(matrix)
        self.size = self._packed.size
        self.first_panel = Panel(self._packed.ctypes.data, inputs, packer.entry_bytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project rows [T, in] to [T, out]."""
        out = x.new_empty(len(x), self.outputs)
        self._run(x, self._threads(x), whole_product(out.numpy()))
        return out

    def best(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of each row's largest output [T], the first of equal ones."""
        threads = self._threads(x)
        product = best_product(self.outputs, threads, len(x))
        self._run(x, threads, product)
        values, outputs = product.best
        first = values.argmax(axis=0)  # members' panels are in order
        return torch.from_numpy(outputs[first, np.arange(len(x))])

    def _threads(self, x: torch.Tensor) -> int:
        return process_team().threads_for(len(x) * self.size)

    def _run(self, x: torch.Tensor, threads: int, product: Product) -> None:
        rows = x.contiguous().numpy()
        process_team().run(run_project, threads, rows, self.first_panel, product)


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
        self._decoder = parts.decoder
        self._module = Module(
            embedding=parts.embedding.numpy(),
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
        around = parts.head.size + (0 if projection is None else projection.size)
        self._multiplications = parts.decoder.multiplications + around

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
            rope=decoder.rope,
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
