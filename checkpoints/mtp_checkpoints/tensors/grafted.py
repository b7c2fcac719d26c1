"""Two checkpoints read as one: the main tensors of the first, the MTP tensors of another."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mtp_checkpoints.containers.base import ShardHeader, TensorInfo
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.reader import Checkpoint


@dataclass(frozen=True)
class GraftedCheckpoint(Checkpoint):
    """A main checkpoint, which path, config and files are of, with MTP tensors of a donor.

    moved are the donor's tensors by the name that they have here; whatever else its shards hold is
    no tensor of this checkpoint. replaced are tensors of the main checkpoint's own MTP layer.
    """

    host: Checkpoint | None = None
    donor: Checkpoint | None = None
    moved: Mapping[str, TensorInfo] | None = None
    replaced: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        host: Checkpoint,
        donor: Checkpoint,
        config: dict[str, Any],
        moved: Mapping[str, str],
        replaced: Collection[str] = (),
    ) -> Self:
        """Join two checkpoints; moved are names of the donor's tensors by their names here,
        replaced those of the host's that they take the place of."""
        taken = {name: donor.tensors[source]._replace(name=name) for name, source in moved.items()}
        places = {tensor.path for tensor in taken.values()}
        digest = hashlib.sha256((host.config_sha256 + donor.config_sha256).encode()).hexdigest()
        return cls(
            path=host.path,
            config=config,
            config_sha256=digest,
            shards=host.shards + tuple(s for s in donor.shards if s.path in places),
            files=host.files,
            unindexed=host.unindexed,
            repeated=host.repeated,
            strays=host.strays,
            host=host,
            donor=donor,
            moved=taken,
            replaced=frozenset(replaced),
        )

    @property
    def _sides(self) -> tuple[Checkpoint, Checkpoint, Mapping[str, TensorInfo]]:
        assert self.host is not None and self.donor is not None and self.moved is not None
        return self.host, self.donor, self.moved

    @property
    def main_bundle(self) -> Path | None:
        return self._sides[0].main_bundle

    @property
    def mtp_bundle(self) -> Path | None:
        return self._sides[1].mtp_bundle

    def with_shards(self, shards: Iterable[ShardHeader]) -> Self:
        further = tuple(shards)
        tensors = {tensor.name: tensor for shard in further for tensor in shard.tensors}
        whole = super().with_shards(further)
        return replace(whole, moved={**self._sides[2], **tensors})

    @property
    def main_shards(self) -> tuple[ShardHeader, ...]:
        return self._sides[0].shards

    @property
    def mtp_shards(self) -> tuple[ShardHeader, ...]:
        return self.shards[len(self.main_shards) :]

    @property
    def origin(self) -> Mapping[str, Any]:
        host, donor, _ = self._sides
        return {
            part: {**side.origin, "config_sha256": side.config_sha256}
            for part, side in ((MAIN, host), (MTP, donor))
        }

    @property
    def readers(self) -> int:
        host, donor, _ = self._sides
        return max(host.readers, donor.readers)

    def shard_name(self, shard: ShardHeader) -> str:
        host, donor, _ = self._sides
        part, side = (MAIN, host) if shard in host.shards else (MTP, donor)
        return f"{part}/{side.shard_name(shard)}"

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        host, _, moved = self._sides
        kept = {name: tensor for name, tensor in host.tensors.items() if name not in self.replaced}
        return {**kept, **moved}
