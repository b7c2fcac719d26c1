"""GGUF files of one part, to be written: outside them every tensor has its released name, and every
expert is by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtp_checkpoints.containers.base import FileLayout, Opened
from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURES
from mtp_checkpoints.containers.gguf_architectures.base import Place
from mtp_checkpoints.containers.gguf_file import NAME, SUFFIX, file_layout, split_name
from mtp_checkpoints.containers.gguf_values import Keys, i32, u16
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.sources.byte_source import ByteSource


@dataclass(frozen=True)
class GgufFiles:
    """Container of the files of one part, all of whose keys are in the first.

    base is the name of the files, but for their number and ending. module_alone: the layer of an
    MTP module that is in files without a main model, mtp_layer that of one in any. number, count
    and tensors are those of one file, of all, and of the tensors in all.
    """

    architecture: str
    keys: Keys
    base: str
    module_alone: int | None = None
    mtp_layer: int | None = None
    number: int = 1
    count: int = 1
    tensors: int = 0

    name: ClassVar[str] = NAME
    title: ClassVar[str] = f"*{SUFFIX}"
    index_name: ClassVar[str | None] = None

    def probe(self, source: ByteSource) -> bool:
        return any(name.endswith(SUFFIX) for name in source.names())

    def open(self, source: ByteSource) -> Opened:
        raise AssertionError("these files are only written")

    def index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> dict[str, Any]:
        raise AssertionError("these files have no index")

    def shard_name(self, number: int, count: int) -> str:
        """As llama.cpp has them: NAME.gguf, or NAME-00001-of-00005.gguf."""
        return f"{self.base}{SUFFIX}" if count == 1 else split_name(self.base, number, count)

    def of_shard(self, number: int, count: int, tensors: int) -> GgufFiles:
        """Return the container of one of several files that hold so many tensors together."""
        return replace(self, number=number, count=count, tensors=tensors)

    def place(self, released: str) -> Place:
        """Return where a tensor is in the files (AssertionError for one that they cannot hold)."""
        place = ARCHITECTURES[self.architecture].place(released, self.module_alone, self.mtp_layer)
        assert place is not None, f"{released} is no tensor of {self.architecture}"
        return place

    def layout(self, tensors: Sequence[OutputTensor]) -> FileLayout:
        """Lay out one file, in which all experts of one merged tensor are."""
        parts: dict[str, dict[int, OutputTensor]] = {}
        for tensor in tensors:
            name, expert = self.place(tensor.name)
            parts.setdefault(name, {})[-1 if expert is None else expert] = tensor
        merged = [_merged(name, own) for name, own in parts.items()]
        layout = file_layout(self._own_keys, merged)
        places: dict[str, range] = {}
        for name, own in parts.items():
            start = layout.places[name].start
            for _, tensor in sorted(own.items()):
                places[tensor.name] = range(start, start + tensor.size_bytes)
                start += tensor.size_bytes
        return replace(layout, places=places)

    @property
    def _own_keys(self) -> Keys:
        if self.count == 1:
            return self.keys
        split = {
            "split.no": u16(self.number - 1),
            "split.count": u16(self.count),
            "split.tensors.count": i32(self.tensors),
        }
        return {**self.keys, **split} if self.number == 1 else split


def _merged(name: str, own: Mapping[int, OutputTensor]) -> OutputTensor:
    """Return the tensor of a file: one as it is, or the experts' as one of three dimensions."""
    first = next(iter(own.values()))
    if own.keys() == {-1}:
        return first._replace(name=name)
    alike = {(tensor.dtype, tensor.shape) for tensor in own.values()}
    assert len(alike) == 1 and own.keys() == set(range(len(own))), f"experts of {name}"
    return first._replace(name=name, shape=(len(own), *first.shape))
