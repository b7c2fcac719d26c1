"""What goes where: output shards as ordered steps from source tensors to output tensors.

Plain data and pure functions; nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtp_export.bundle.links import Link
from mtp_export.checkpoint.dtypes import tensor_bytes
from mtp_export.checkpoint.header import ShardHeader

COPY = "copy"


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: source tensors by name in, output tensors of one shard out.

    operation is "copy" (one tensor, its bytes unchanged) or the name of a transform. scheme is the
    precision scheme that asked for it, if one did.
    """

    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[OutputTensor, ...]
    scheme: str | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.outputs)


@dataclass(frozen=True)
class OutputShard:
    """One output file; with linked_from set, the whole source shard under a new name.

    link says how it gets there, checked that its tensors are read all the same, for their
    checksums.
    """

    steps: tuple[Step, ...]
    linked_from: ShardHeader | None = None
    link: Link = Link.COPY
    checked: bool = False
    file_name: str = ""

    def linked_by(self, links: Mapping[Path, Link], checked: bool) -> OutputShard:
        """The same shard, linked the way that its source shard is; COPY has it written."""
        if self.linked_from is None:
            return self
        link = links[self.linked_from.path]
        if link is Link.COPY:
            return replace(self, linked_from=None)
        return replace(self, link=link, checked=checked)

    @property
    def is_read(self) -> bool:
        """Whether its tensors pass through this run, to be written or only checksummed."""
        return self.linked_from is None or self.checked

    @property
    def size_bytes(self) -> int:
        return sum(step.size_bytes for step in self.steps)


@dataclass(frozen=True)
class PartPlan:
    """One folder of a bundle: its shards, config.json, and files copied from the source as is."""

    name: str
    shards: tuple[OutputShard, ...]
    config: dict[str, Any]
    extra_files: tuple[str, ...]

    @property
    def written(self) -> tuple[OutputShard, ...]:
        return tuple(shard for shard in self.shards if shard.linked_from is None)

    @property
    def linked(self) -> tuple[OutputShard, ...]:
        return tuple(shard for shard in self.shards if shard.linked_from is not None)

    @property
    def tensor_count(self) -> int:
        return sum(len(step.outputs) for shard in self.shards for step in shard.steps)

    @property
    def checked(self) -> tuple[OutputShard, ...]:
        return tuple(shard for shard in self.linked if shard.checked)

    def linked_by(self, links: Mapping[Path, Link], checked: bool) -> PartPlan:
        """The same part with a way to link for each source shard; COPY has it written.

        checked: whether linked shards are read for their checksums.
        """
        shards = tuple(shard.linked_by(links, checked) for shard in self.shards)
        return replace(self, shards=shards)

    def index(self) -> dict[str, Any]:
        """The content of model.safetensors.index.json."""
        weight_map = {
            tensor.name: shard.file_name
            for shard in self.shards
            for step in shard.steps
            for tensor in step.outputs
        }
        total = sum(shard.size_bytes for shard in self.shards)
        return {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }


def copy_step(source: OutputTensor, name: str | None = None) -> Step:
    """A tensor's bytes unchanged, under its own name or another."""
    return Step(COPY, (source.name,), (replace(source, name=name or source.name),))


def pack(steps: Iterable[Step], max_shard_bytes: int) -> list[tuple[Step, ...]]:
    """Fill shards in order up to a size; a step larger than that gets a shard of its own."""
    shards: list[tuple[Step, ...]] = []
    current: list[Step] = []
    current_bytes = 0
    for step in steps:
        if current and current_bytes + step.size_bytes > max_shard_bytes:
            shards.append(tuple(current))
            current, current_bytes = [], 0
        current.append(step)
        current_bytes += step.size_bytes
    if current:
        shards.append(tuple(current))
    return shards


def number_shards(shards: Sequence[OutputShard]) -> tuple[OutputShard, ...]:
    """Name the shards of a part the way the Hub does: model-00001-of-00163.safetensors."""
    return tuple(
        replace(shard, file_name=f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        for number, shard in enumerate(shards, 1)
    )
