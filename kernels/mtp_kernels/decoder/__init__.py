"""DeepSeek-V3 decoder layers in float32 on a CPU, compiled: a pass over all layers is one call.

Launching an operation costs more than computing it when a model is small or rows are few, so that
nothing is launched: a team of threads runs the whole stack. Each row is computed in one fixed order
and its bits depend on neither its batch nor the number of threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_kernels.cpu.memory import LINE, Arena, floats
from mtp_kernels.cpu.team import process_team
from mtp_kernels.cpu.vectors import PANEL
from mtp_kernels.decoder.attention import Batch, Scratch
from mtp_kernels.decoder.passes import run_layers, run_norm, run_project
from mtp_kernels.decoder.recursion import Best, Chains, Module, most_parts, run_recursion
from mtp_kernels.decoder.rows import panels_of, turns
from mtp_kernels.decoder.weights import LayerWeights, PackedLayer, Sizes, pack, pack_layer, table
from mtp_kernels.verify_attention.compiled_parts import Parts, places_of, plan

__all__ = [
    "Arena",
    "Decoder",
    "LayerWeights",
    "Norm",
    "PackedLayer",
    "Projection",
    "Recursion",
    "Sizes",
    "pack_layer",
]


class Decoder:
    """Some layers of a model, with the rotary positions that they share.

    inverse [r/2] float32: radians per position of each pair; amplitude scales every rotation.
    """

    def __init__(
        self,
        sizes: Sizes,
        layers: Sequence[PackedLayer],
        inverse: torch.Tensor,
        amplitude: float,
    ) -> None:
        self.sizes = sizes
        self._layers = tuple(layers)
        self.table = table(layers)
        self._rope = inverse, amplitude
        self.inverse = inverse.float().numpy()
        self.amplitude = np.float32(amplitude)
        fields = [packed.layer for packed in layers]
        self._experts = max(
            layer.shared + sizes.experts_per_token * (layer.routed > 0) for layer in fields
        )
        self._inner = max(panels_of(layer.inner) * PANEL for layer in fields)
        self.multiplications = sum(tensor.numel() for packed in layers for tensor in packed.tensors)

    def __len__(self) -> int:
        return len(self._layers)

    def each(self) -> Iterator[Decoder]:
        """Every layer by itself."""
        for layer in self._layers:
            yield Decoder(self.sizes, [layer], *self._rope)

    def __call__(self, x: torch.Tensor, layout: BatchLayout, kv_cache: torch.Tensor) -> None:
        """Take the stream x [T, d] through the layers, in place.

        kv_cache [layers, pages, page, c+r] gets the rows' latents and rope keys, and is attended.
        """
        page = kv_cache.shape[2]
        tiles, waves, parts = plan(layout.cu_q.numpy(), layout.kv_lens.numpy(), self.sizes.heads)
        rotations = turns(layout.positions.numpy(), self.inverse, self.amplitude)
        slots, page_table = layout.slots.numpy(), layout.page_table.numpy()
        places = places_of(tiles, self.sizes.heads, len(x))
        batch = Batch(rotations, slots, page_table, page, places, tiles, waves)
        team = process_team()
        team.run(
            run_layers,
            team.threads_for(len(x) * self.multiplications),
            self.table,
            self.sizes,
            batch,
            kv_cache.flatten(1, 2).numpy(),
            self.scratch(len(x), parts),
            x.numpy(),
        )

    def scratch(self, count: int, parts: int) -> Scratch:
        """Memory for a pass of so many rows, and parts of attention."""
        sizes = self.sizes
        query = sizes.query_rank or sizes.heads * (sizes.nope + sizes.rope)
        width = panels_of(query + sizes.latent + sizes.rope) * PANEL
        return Scratch(
            *_floats(
                (count, width),
                (count * sizes.heads, sizes.latent + sizes.rope),
                (count, sizes.heads * sizes.value),
                (count, sizes.hidden),
                (count, sizes.experts_per_token),
                (count * self._experts, self._inner),
            ),
            np.empty((count, sizes.experts_per_token), np.int64),
            Parts(*_floats((parts, sizes.latent), (parts,), (parts,))),
        )


class Norm:
    """RMS norm with a weight [d]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight.float().numpy()
        self.eps = np.float32(eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, d]."""
        out = torch.empty_like(x)
        process_team().run(run_norm, 1, x.numpy(), self.weight, self.eps, out.numpy())
        return out


class Projection:
    """y = x @ matrix.T for a matrix [out, in]."""

    def __init__(self, matrix: torch.Tensor, arena: Arena) -> None:
        self._outputs = len(matrix)
        self.packed = arena.keep(pack(matrix)).numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] to [T, out]."""
        out = x.new_empty(len(x), self._outputs)
        team = process_team()
        threads = team.threads_for(len(x) * self.packed.size)
        team.run(run_project, threads, x.contiguous().numpy(), self.packed, out.numpy())
        return out


class Recursion:
    """The best drafts of an MTP module by recursion.

    decoder is its layer; embedding [vocab, d]; norms of the embedding, of the hidden state and
    before the head, all with one eps; projection [d, 2d] and head [vocab, d]. recycles_normed: a
    draft passes on its hidden state after the head's norm, not before.
    """

    def __init__(
        self,
        decoder: Decoder,
        embedding: torch.Tensor,
        norms: tuple[Norm, Norm, Norm],
        projection: Projection,
        head: Projection,
        recycles_normed: bool,
    ) -> None:
        self._decoder = decoder
        of_embedding, of_hidden, before_head = norms
        self._module = Module(
            embedding.numpy(),
            of_embedding.weight,
            of_hidden.weight,
            projection.packed,
            before_head.weight,
            head.packed,
            before_head.eps,
            recycles_normed,
        )
        self._multiplications = decoder.multiplications + projection.packed.size + head.packed.size

    def __call__(
        self,
        x: torch.Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        page_table: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> list[list[int]]:
        """counts[i] >= 1 tokens for each row of x [b, d], the output at position starts[i].

        Rows are ordered by counts, the largest first. kv_cache [1, pages, page, c+r] gets the rows
        of positions starts[i] + 1 to starts[i] + counts[i] - 1; page_table int32 covers them.
        """
        decoder, team, most = self._decoder, process_team(), counts[0]
        chains = Chains(
            np.array(starts),
            np.array(counts),
            page_table.numpy(),
            kv_cache.shape[2],
            decoder.inverse,
            decoder.amplitude,
        )
        threads = team.threads_for(sum(counts) * self._multiplications)
        drafts = np.empty((len(counts), most), np.int64)
        shape = threads, len(counts)
        team.run(
            run_recursion,
            threads,
            decoder.table,
            decoder.sizes,
            self._module,
            chains,
            kv_cache.flatten(1, 2).numpy(),
            decoder.scratch(len(counts), most_parts(chains, most, decoder.sizes.heads)),
            Best(np.empty(shape, np.float32), np.empty(shape, np.int64)),
            x.numpy(),
            drafts,
        )
        return [row[:count] for row, count in zip(drafts.tolist(), counts, strict=True)]


def _floats(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays side by side in one memory; each begins at a cache line, as vectors should."""
    sizes = [math.prod(shape) for shape in shapes]
    ends = list(itertools.accumulate(-(-size // LINE) * LINE for size in sizes))
    memory = floats(ends[-1])
    starts = [0, *ends[:-1]]
    return [
        memory[start : start + size].reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]
