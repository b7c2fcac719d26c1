"""DeepSeek-V3 decoder layers in float32 on a CPU, compiled: a pass over all layers is one call.

Launching an operation costs more than computing it when a model is small or rows are few, so that
nothing is launched: a team of threads runs the whole stack. Each row is computed in one fixed order
and its bits depend on neither its batch nor the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mtp_kernels.decoder.attention import Batch, Scratch
from mtp_kernels.decoder.passes import run_layers, run_norm, run_project
from mtp_kernels.decoder.rows import panels_of, turns
from mtp_kernels.decoder.weights import LayerWeights, PackedLayer, Sizes, pack, pack_layer, table
from mtp_kernels.team import process_team
from mtp_kernels.vectors import PANEL
from mtp_kernels.verify_attention.compiled_parts import Parts, plan

__all__ = [
    "Decoder",
    "LayerWeights",
    "Norm",
    "PackedLayer",
    "Projection",
    "Rows",
    "Sizes",
    "pack_layer",
]


@dataclass(frozen=True)
class Rows:
    """The rows of a pass and whose they are, on the CPU.

    positions [T] and slots [T] int64 (a slot is page * page_size + offset); page_table
    [b, max_pages], kv_lens [b] and cu_q [b+1] int32, as `verify_attention` takes them.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    cu_q: torch.Tensor


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
        self._sizes = sizes
        self._layers = tuple(layers)
        self._table = table(layers)
        self._rope = inverse, amplitude
        self._inverse = inverse.float().numpy()
        fields = [packed.layer for packed in layers]
        self._experts = max(
            layer.shared + sizes.experts_per_token * (layer.routed > 0) for layer in fields
        )
        self._inner = max(panels_of(layer.inner) * PANEL for layer in fields)
        self._multiplications = sum(
            tensor.numel() for packed in layers for tensor in packed.tensors
        )

    def __len__(self) -> int:
        return len(self._layers)

    def each(self) -> Iterator[Decoder]:
        """Every layer by itself."""
        for layer in self._layers:
            yield Decoder(self._sizes, [layer], *self._rope)

    def __call__(self, x: torch.Tensor, rows: Rows, kv_cache: torch.Tensor) -> None:
        """Take the stream x [T, d] through the layers, in place.

        kv_cache [layers, pages, page, c+r] gets the rows' latents and rope keys, and is attended.
        """
        page = kv_cache.shape[2]
        tiles, waves, parts = plan(rows.cu_q.numpy(), rows.kv_lens.numpy(), self._sizes.heads)
        rotations = turns(rows.positions.numpy(), self._inverse, np.float32(self._rope[1]))
        slots, page_table = rows.slots.numpy(), rows.page_table.numpy()
        batch = Batch(rotations, slots, page_table, page, tiles, waves)
        team = process_team()
        team.run(
            run_layers,
            team.threads_for(len(x) * self._multiplications),
            self._table,
            self._sizes,
            batch,
            kv_cache.flatten(1, 2).numpy(),
            self._scratch(len(x), parts),
            x.numpy(),
        )

    def _scratch(self, count: int, parts: int) -> Scratch:
        sizes = self._sizes
        query = sizes.query_rank or sizes.heads * (sizes.nope + sizes.rope)
        width = panels_of(query + sizes.latent + sizes.rope) * PANEL
        return Scratch(
            _floats(count, width),
            _floats(count, sizes.heads, sizes.latent + sizes.rope),
            Parts(_floats(parts, sizes.latent), _floats(parts), _floats(parts)),
            _floats(count, sizes.heads * sizes.value),
            _floats(count, sizes.hidden),
            np.empty((count, sizes.experts_per_token), np.int64),
            _floats(count, sizes.experts_per_token),
            _floats(count * self._experts, self._inner),
        )


class Norm:
    """RMS norm with a weight [d]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.float().numpy()
        self._eps = np.float32(eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, d]."""
        out = torch.empty_like(x)
        process_team().run(run_norm, 1, x.numpy(), self._weight, self._eps, out.numpy())
        return out


class Projection:
    """y = x @ matrix.T for a matrix [out, in]."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._outputs = len(matrix)
        self._packed = pack(matrix)
        self._array = self._packed.numpy()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] to [T, out]."""
        out = x.new_empty(len(x), self._outputs)
        team = process_team()
        threads = team.threads_for(len(x) * self._packed.numel())
        team.run(run_project, threads, x.contiguous().numpy(), self._array, out.numpy())
        return out


def _floats(*shape: int) -> np.ndarray:
    return np.empty(shape, np.float32)
