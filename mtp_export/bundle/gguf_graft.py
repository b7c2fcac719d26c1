"""Files of a graft onto a main model in GGUF files, which stay as they are: llama.cpp loads the
module from a file of its own beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtp_checkpoints.containers.base import FileLayout, Opened, ShardHeader
from mtp_checkpoints.containers.gguf_file import NAME, SUFFIX, read_header
from mtp_checkpoints.containers.gguf_vocabulary import copied_keys
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.sources.byte_source import ByteSource
from mtp_checkpoints.sources.gguf_model import model_and_parts
from mtp_checkpoints.tensors.experts_apart import experts_apart
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.export import viewed
from mtp_export.bundle.gguf_parts import GgufParts
from mtp_export.bundle.graft_sources import GraftSources
from mtp_export.bundle.options import ContentOptions
from mtp_export.plan import OutputShard, copy_step


@dataclass(frozen=True)
class KeptFile:
    """Container of one GGUF file that is copied as it is."""

    shard: ShardHeader

    name: ClassVar[str] = NAME
    title: ClassVar[str] = f"*{SUFFIX}"
    index_name: ClassVar[str | None] = None

    def probe(self, source: ByteSource) -> bool:
        return any(name.endswith(SUFFIX) for name in source.names())

    def open(self, source: ByteSource) -> Opened:
        raise AssertionError("such a file is only copied")

    def shard_name(self, number: int, count: int) -> str:
        return self.shard.path.name

    def layout(self, tensors: Sequence[OutputTensor]) -> FileLayout:
        places = {
            one.name: range(one.offset_bytes, one.offset_bytes + one.size_bytes)
            for one in self.shard.tensors
        }
        data = min((place.start for place in places.values()), default=self.shard.size_bytes)
        with closing(self.shard.file.open()) as file:
            head = file.read(0, data)
        return FileLayout(head, places, self.shard.size_bytes)

    def index(self, shards: Mapping[str, Sequence[OutputTensor]]) -> dict[str, Any]:
        raise AssertionError("these files have no index")


def with_single_experts(sources: GraftSources) -> GraftSources:
    """Return sources with the experts of the donor's MTP layers one by one."""
    opened = sources.donor, sources.donated
    apart = experts_apart(sources.donor, sources.donated.family, main=False)
    donor, donated = viewed(apart, opened)
    return replace(sources, donor=donor, donated=donated)


def files_of_main(sources: GraftSources) -> Checkpoint:
    """Return the main model with what lies in its files, as plans have it, without the file of a
    module that is to be replaced.

    Raises UnsupportedError where such a module is inside a file of the main model.
    """
    kept = []
    for shard in sources.host.shards:
        inside = [tensor.name for tensor in shard.tensors if tensor.name in sources.own]
        if len(inside) == len(shard.tensors) > 0:
            continue
        if inside:
            raise UnsupportedError(
                "The main model's file has an MTP layer inside, and is not written anew",
                where=shard.path,
                expected="a main model without the layer, or with it in a file of its own",
                found=inside[0],
                todo="Take a file of the main model alone: llama.cpp's converter writes such with"
                " --no-mtp",
            )
        kept.append(replace(shard, tensors=shard.written, apart=()))
    return replace(sources.host, shards=tuple(kept))


def grafted_parts(host: Checkpoint, content: ContentOptions) -> GgufParts:
    """Return what makes the files of both parts: the main model's as they are, and the module's
    under their name, with their vocabulary."""
    shards = tuple(
        OutputShard(
            steps=tuple(map(copy_step, shard.tensors)),
            linked_from=shard,
            file_name=shard.path.name,
            container=KeptFile(shard),
        )
        for shard in host.shards
    )
    first = host.shards[0]
    return GgufParts(
        model_and_parts(first.path.name)[0],
        copied_keys(read_header(first.file).keys),
        content.max_shard_bytes,
        main=shards,
    )
