"""Plans of output shards: ordered steps from source tensors to output tensors.

Plain data and pure functions; nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

from mtp_checkpoints.containers import SAFETENSORS
from mtp_checkpoints.containers.base import (
    CONFIG_NAME,
    Container,
    FileLayout,
    ShardHeader,
    TensorInfo,
)
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.sources.byte_source import ByteSource, Place
from mtp_checkpoints.tensors.tensor_stream import TensorStream


class Link(StrEnum):
    """Ways in which a whole source shard comes into a bundle."""

    AUTO = "auto"
    REFLINK = "reflink"
    HARDLINK = "hardlink"
    COPY = "copy"


# Takes the number of an output and the next piece of its bytes.
Sink = Callable[[int, memoryview], None]
# Figures about the conversion of a tensor, which the manifest records with it.
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Resources:
    """Memory in bytes that one transform may use, and the torch device that it computes on.

    measured: what the transforms of joined weights leave for one another, by name; None where there
    is one alone.
    """

    budget_bytes: int
    device: str
    measured: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Operation of a step that leaves the bytes of one tensor unchanged."""

    name: ClassVar[str] = "copy"


class Transform(Protocol):
    """Operation of a step that computes its outputs: a frozen dataclass of its parameters."""

    @property
    def name(self) -> str:
        """Name in the manifest."""

    @property
    def uses_torch(self) -> bool:
        """True where torch computes, on whatever device, and not compiled code alone."""

    def run(
        self,
        inputs: Sequence[TensorStream],
        outputs: Sequence[OutputTensor],
        sink: Sink,
        resources: Resources,
    ) -> Facts:
        """Pass every output's bytes to the sink in order; return the facts of the first output.

        Raises InvalidInputError naming a tensor that cannot be converted.
        """


COPY = Copy()


class Step(NamedTuple):
    """One operation: source tensors by name in, output tensors of one shard out.

    scheme is the precision scheme that asked for the operation, if one did.
    """

    operation: Copy | Transform
    inputs: tuple[str, ...]
    outputs: tuple[OutputTensor, ...]
    scheme: str | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.outputs)


@dataclass(frozen=True)
class OutputShard:
    """One output file; with linked_from set, the whole source shard under a new name.

    container is the format of the file, link is the way it gets there. checked: the tensors of a
    linked shard are read nevertheless, for their checksums.
    """

    steps: tuple[Step, ...]
    linked_from: ShardHeader | None = None
    link: Link = Link.COPY
    checked: bool = False
    file_name: str = ""
    container: Container = SAFETENSORS

    def linked_by(self, links: Mapping[Place, Link], checked: bool) -> OutputShard:
        """Return the shard linked as its source shard can be; one with COPY is written."""
        if self.linked_from is None:
            return self
        link = links[self.linked_from.path]
        if link is Link.COPY:
            return replace(self, linked_from=None)
        return replace(self, link=link, checked=checked)

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        return tuple(tensor for step in self.steps for tensor in step.outputs)

    def layout(self) -> FileLayout:
        """Return where each tensor's bytes are in the file that is written."""
        return self.container.layout(self.tensors)

    @property
    def is_read(self) -> bool:
        """True when its tensors pass through the run, to be written or only checksummed."""
        return self.linked_from is None or self.checked

    @cached_property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for step in self.steps for tensor in step.outputs)


@dataclass(frozen=True)
class PartPlan:
    """One folder of a bundle: shards, config.json, and files copied unchanged from the source, or
    from `files` where they are another's."""

    name: str
    shards: tuple[OutputShard, ...]
    config: dict[str, Any]
    extra_files: tuple[str, ...]
    files: ByteSource | None = None

    @property
    def written(self) -> tuple[OutputShard, ...]:
        return tuple(shard for shard in self.shards if shard.linked_from is None)

    @property
    def linked(self) -> tuple[OutputShard, ...]:
        return tuple(shard for shard in self.shards if shard.linked_from is not None)

    @property
    def container(self) -> Container:
        """Format of its shards."""
        return self.shards[0].container if self.shards else SAFETENSORS

    @property
    def other_files(self) -> tuple[str, ...]:
        """Files beside the shards, in the order in which they are written: config.json last."""
        return (*self.extra_files, *self.index_names, CONFIG_NAME)

    @property
    def index_names(self) -> tuple[str, ...]:
        """The file that says which shard holds a tensor, where the format has one."""
        name = self.container.index_name
        return () if name is None else (name,)

    @property
    def file_names(self) -> tuple[str, ...]:
        """All files of the folder."""
        return (*(shard.file_name for shard in self.shards), *self.other_files)

    @cached_property
    def tensor_count(self) -> int:
        return sum(len(step.outputs) for shard in self.shards for step in shard.steps)

    @property
    def checked(self) -> tuple[OutputShard, ...]:
        return tuple(shard for shard in self.linked if shard.checked)

    def linked_by(self, links: Mapping[Place, Link], checked: bool) -> PartPlan:
        """Return the part with its shards linked as each source shard can be.

        checked: linked shards are read for their checksums.
        """
        shards = tuple(shard.linked_by(links, checked) for shard in self.shards)
        return replace(self, shards=shards)

    def index(self) -> dict[str, Any]:
        """Return the content of the index of its shards."""
        return self.container.index({shard.file_name: shard.tensors for shard in self.shards})


def copy_step(source: OutputTensor | TensorInfo, name: str | None = None) -> Step:
    """Return the step that keeps a tensor's bytes, under its own name or another."""
    copied = OutputTensor(name or source.name, source.dtype, source.shape)
    return Step(COPY, (source.name,), (copied,))


def pack(steps: Iterable[Step], max_shard_bytes: int) -> list[tuple[Step, ...]]:
    """Fill shards in order up to a size; a larger step gets a shard of its own."""
    return pack_together(((step,) for step in steps), max_shard_bytes)


def pack_together(groups: Iterable[Sequence[Step]], max_shard_bytes: int) -> list[tuple[Step, ...]]:
    """Fill shards in order up to a size with groups of steps, each in one shard."""
    shards: list[tuple[Step, ...]] = []
    current: list[Step] = []
    current_bytes = 0
    for group in groups:
        size_bytes = sum(step.size_bytes for step in group)
        if current and current_bytes + size_bytes > max_shard_bytes:
            shards.append(tuple(current))
            current, current_bytes = [], 0
        current += group
        current_bytes += size_bytes
    if current:
        shards.append(tuple(current))
    return shards


def number_shards(
    shards: Sequence[OutputShard], container: Container = SAFETENSORS
) -> tuple[OutputShard, ...]:
    """Name the shards of a part, which are files of a container."""
    return tuple(
        replace(shard, file_name=container.shard_name(number, len(shards)), container=container)
        for number, shard in enumerate(shards, 1)
    )
