"""Memory, time and disk that a tuning run takes, from the sizes that config.json tells."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mtp_export.bundle.links import guess_links
from mtp_export.plan import Link
from mtp_export.tune.draft import Sizes, draft_type
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.row_store import Data, row_bytes
from mtp_export.tune.source_bundle import SourceBundle
from mtp_runtime.models.load import DTYPES

_FLOAT32 = 4
# Of a parameter: itself, its gradient, and the two averages of AdamW.
STATE_BYTES = 4 * _FLOAT32
_PASSES = 3  # forward, and the gradients of inputs and of weights
_EFFICIENCY = 0.3  # of the rate of large products
_MATRIX = 1024


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of a run; activations are not counted.

    parameters: of the draft, without embedding and head; trained: those of the training.
    state_bytes: the latter with gradients and optimizer, in main memory with --offload.
    weights_bytes: what a step computes with, and its gradients. disk_bytes: of the work folder;
    output_bytes: of the bundle, where shards that can be linked take none.
    """

    parameters: int
    trained: int
    rows: int
    state_bytes: int
    weights_bytes: int
    rows_bytes: int
    disk_bytes: int
    output_bytes: int
    seconds: float

    def as_json(self) -> dict[str, int | float]:
        return {**vars(self), "seconds": round(self.seconds, 1)}


def estimate(options: TuneOptions, source: SourceBundle, data: Data) -> Estimate:
    """Return what a run will take; the time is that of a product of matrices here, scaled."""
    train, own, kind = options.train, options.data, draft_type(options.draft)
    sizes = kind.sizes(options, source)
    rows = sum(
        min(own.text_tokens, len(line.prompt) + len(line.answer or range(own.new_tokens)))
        for line in data.training
    )
    family = source.family
    taps = len(kind.taps(len(family.layers)))
    rows_bytes = rows * row_bytes(family.facts.hidden * max(1, taps))
    head = family.facts.vocab * family.facts.hidden
    weights_bytes = 2 * sizes.parameters * DTYPES[train.dtype].itemsize + 2 * head * _FLOAT32
    return Estimate(
        parameters=sizes.parameters,
        trained=sizes.trained,
        rows=rows,
        state_bytes=sizes.trained * STATE_BYTES,
        weights_bytes=weights_bytes + sizes.stored_bytes,
        rows_bytes=rows_bytes,
        # While a saved state is written the one before it is still there; none has gradients.
        disk_bytes=rows_bytes + 6 * _FLOAT32 * sizes.trained + _FLOAT32 * sizes.parameters,
        output_bytes=output_bytes(options, source, sizes),
        seconds=_seconds(options, sizes, head),
    )


def output_bytes(options: TuneOptions, source: SourceBundle, sizes: Sizes) -> int:
    """Return the bytes that the bundle adds to its disk."""
    rewritten = () if sizes.new_bytes else source.mtp.shards
    kept = [shard for shard in source.shards if shard not in rewritten]
    links = guess_links(Link.AUTO, [shard.path for shard in kept], options.output_dir)
    copied = [shard for shard in kept if links[shard.path] is Link.COPY]
    return sizes.new_bytes + sum(shard.size_bytes for shard in (*rewritten, *copied))


def _seconds(options: TuneOptions, sizes: Sizes, head: int) -> float:
    """Return the seconds of all steps: every row goes through what one row uses of the draft, and
    through the head, once for every depth."""
    train = options.train
    operations = 2 * _PASSES * sizes.used + 2 * 2 * head
    rows = train.batch_tokens * train.steps * train.k
    rate = operations_per_second(options.device, DTYPES[train.dtype])
    return rows * operations / (rate * _EFFICIENCY)


def operations_per_second(device: str, dtype: torch.dtype) -> float:
    """Measure products of large matrices, for a fraction of a second."""
    matrix = torch.ones(_MATRIX, _MATRIX, device=device, dtype=dtype)
    matrix @ matrix
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        (matrix @ matrix)[0, 0].item()
        count += 1
    return float(2 * _MATRIX**3 * count / (time.perf_counter() - start))
