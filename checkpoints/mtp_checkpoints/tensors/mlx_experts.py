"""Experts as mlx-lm stacks them, one by one under their released names: their bytes lie side by
side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mtp_checkpoints.containers.base import ShardHeader, TensorInfo

_MOST = 1 << 14  # experts of a layer; more are damage
_STACKED = re.compile(r"(.+)\.switch_mlp\.((?:gate|up|down)_proj\.[a-z]+)")


def with_experts_of_mlx(shard: ShardHeader) -> ShardHeader:
    """Return a shard as if it held experts one by one; plans have it as it is."""
    if not any(".switch_mlp." in tensor.name for tensor in shard.tensors):
        return shard
    return replace(shard, tensors=tuple(_one_by_one(shard.tensors)), apart=shard.written)


def _one_by_one(tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield tensors, stacked ones [experts, rows, columns] as those of each expert."""
    for tensor in tensors:
        found = _STACKED.fullmatch(tensor.name)
        if found is None or len(tensor.shape) < 2 or not 0 < tensor.shape[0] <= _MOST:
            yield tensor
            continue
        (count, *shape), (layer, last) = tensor.shape, found.groups()
        size = tensor.size_bytes // count
        for number in range(count):
            yield tensor._replace(
                name=f"{layer}.experts.{number}.{last}",
                shape=tuple(shape),
                offset_bytes=tensor.offset_bytes + number * size,
                size_bytes=size,
            )
