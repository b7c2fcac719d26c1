"""Reader of a whole checkpoint, wherever and in whatever container it is.

The places of all tensors are known before one is read; nothing is mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mtp_checkpoints.containers import container_of
from mtp_checkpoints.containers.base import (
    QUANTIZATION,
    Opened,
    ShardHeader,
    TensorInfo,
    quantization_field,
)
from mtp_checkpoints.containers.joined_halves import undecoded
from mtp_checkpoints.containers.restored import held
from mtp_checkpoints.sources.addresses import byte_source
from mtp_checkpoints.sources.byte_source import ByteSource, Place, local_path
from mtp_checkpoints.sources.strict_json import parsed_json_object
from mtp_checkpoints.tensors.mlx_forms import with_released_forms
from mtp_checkpoints.tensors.mlx_latents import with_joined_latents
from mtp_checkpoints.tensors.stacked_experts import with_single_experts
from mtp_checkpoints.tensors.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Opened):
    """An opened checkpoint at its place; files is its own source, or that of a bundle's main/."""

    path: Place

    @classmethod
    def open(cls, place: Place) -> Checkpoint:
        """Open the checkpoint at a place; raises what byte_source and read_from do."""
        return cls.read_from(byte_source(place))

    @classmethod
    def read_from(cls, source: ByteSource) -> Checkpoint:
        """Read the config and every tensor's place; raises what container_of and its open do."""
        opened = container_of(source).open(source)
        config = _with_modelopt(opened.config, source)
        shards = tuple(with_single_experts(shard, config) for shard in opened.shards)
        shards = with_joined_latents(with_released_forms(shards, config), config)
        return cls(path=source.path, **vars(replace(opened, config=config, shards=shards)))

    @property
    def folder(self) -> Path:
        """Folder of a local checkpoint."""
        return local_path(self.path)

    @property
    def is_bundle(self) -> bool:
        """True when main and MTP tensors lie in folders of their own."""
        return self.files.path != self.path

    @property
    def mtp_bundle(self) -> Path | None:
        """Folder of the local bundle that the MTP layers are in; None for any other source."""
        return self.main_bundle

    @property
    def main_bundle(self) -> Path | None:
        """Folder of the local bundle that the main layers are in; None for any other source."""
        return self.path if self.is_bundle and isinstance(self.path, Path) else None

    def with_shards(self, shards: Iterable[ShardHeader]) -> Self:
        """Return the checkpoint with the tensors of further shards."""
        return replace(self, shards=(*self.shards, *shards))

    def of_tensors(self, names: Iterable[str]) -> Self:
        """Return the checkpoint as if it held some of its tensors alone."""
        own = set(names)
        kept = (
            replace(shard, tensors=tuple(tensor for tensor in shard.tensors if tensor.name in own))
            for shard in self.shards
        )
        return replace(self, shards=tuple(shard for shard in kept if shard.tensors))

    @property
    def main_shards(self) -> tuple[ShardHeader, ...]:
        """Shards that main tensors may lie in."""
        return self.shards

    @property
    def mtp_shards(self) -> tuple[ShardHeader, ...]:
        """Shards that MTP tensors may lie in."""
        return self.shards

    @property
    def origin(self) -> Mapping[str, Any]:
        """Identity of the source beside its files."""
        return self.files.origin

    @property
    def readers(self) -> int:
        """Number of files that are best opened at once."""
        return self.files.readers

    def shard_name(self, shard: ShardHeader) -> str:
        """Return a shard's path below the checkpoint's own."""
        return str(shard.path).removeprefix(f"{self.path}/")

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.tensors}

    @cached_property
    def written(self) -> dict[str, TensorInfo]:
        """Every tensor by the name that plans and manifests have for it."""
        return {tensor.name: tensor for shard in self.shards for tensor in shard.written}

    @property
    def as_written(self) -> Self:
        """The checkpoint with what lies in its files, as plans have it."""
        shards = (replace(shard, tensors=shard.written, apart=()) for shard in self.shards)
        return replace(self, shards=tuple(shards))

    @cached_property
    def opaque(self) -> tuple[TensorInfo, ...]:
        """Tensors of files in types of which only the bytes are known."""
        parts = chain.from_iterable(map(held, self.tensors.values()))
        return tuple(one for one in parts if one.dtype.is_opaque)

    def check_decoded(self) -> None:
        """Refuse tensors whose numbers nothing here knows (UnsupportedError)."""
        if self.opaque:
            first, *others = self.opaque
            raise undecoded(first, len(others))

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, read now into memory of its own (KeyError for an unknown name)."""
        info = self.tensors[name]
        with TensorReader(info) as reader:
            return reader.rows(0, info.shape[0] if info.shape else 1)


def _with_modelopt(config: dict[str, Any], source: ByteSource) -> dict[str, Any]:
    """Return a config.json with the quantization_config of ModelOpt's older exports, which have it
    in a file of its own: engines read that only where config.json has none."""
    if config.get(quantization_field(config)) or MODELOPT_FILE not in source.names():
        return config
    quantization = parsed_json_object(source.path / MODELOPT_FILE, source.read(MODELOPT_FILE))
    return {**config, QUANTIZATION: {"quant_method": "modelopt", **quantization}}
