"""Fused experts as the matrices of single experts, whose bytes lie side by side in them: whatever
reads, converts or compares a matrix does so with them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families.parts.feed_forward import fused_scale
from mtp_checkpoints.families.single_experts import single_experts
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.tensors.reader import Checkpoint


def experts_apart(
    checkpoint: Checkpoint, family: ModelSpec, *, main: bool = True, mtp: bool = True
) -> Checkpoint:
    """Return a checkpoint as if it held the fused experts of main layers, of MTP layers or of both
    one by one, under the names of such; the checkpoint itself where none are fused."""
    apart = single_experts(family, main=main, mtp=mtp)
    apart |= {fused_scale(name): tuple(map(fused_scale, own)) for name, own in apart.items()}
    if apart.keys().isdisjoint(checkpoint.tensors):
        return checkpoint
    shards = (
        replace(shard, tensors=tuple(_apart(shard.tensors, apart))) for shard in checkpoint.shards
    )
    return replace(checkpoint, shards=tuple(shards))


def _apart(
    tensors: Sequence[TensorInfo], apart: Mapping[str, Sequence[str]]
) -> Iterator[TensorInfo]:
    """Yield tensors, fused ones [experts, rows, columns] as their matrices."""
    for tensor in tensors:
        names = apart.get(tensor.name, ())
        if len(tensor.shape) != 3 or not names or len(names) % tensor.shape[0]:
            yield tensor
            continue
        experts, rows, columns = tensor.shape
        shape = (rows * experts // len(names), columns)
        size_bytes = tensor.size_bytes // len(names)
        for number, name in enumerate(names):
            start = tensor.offset_bytes + number * size_bytes
            yield tensor._replace(name=name, shape=shape, offset_bytes=start, size_bytes=size_bytes)
