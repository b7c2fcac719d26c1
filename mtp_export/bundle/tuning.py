"""Drafts that a bundle has in folders of their own, and what its manifest records of trainings:
bundles that are made of it keep both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from mtp_checkpoints.containers import CONTAINERS
from mtp_checkpoints.containers.base import ShardHeader
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.bundle_folder import MTP
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, read_manifest
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.extra_files import extra_files
from mtp_export.bundle.options import Part
from mtp_export.plan import OutputShard, PartPlan, copy_step
from mtp_runtime.drafters import draft_folders


@dataclass(frozen=True)
class Tuning:
    """Extra drafts of a bundle by method, as open_draft opens them, and the facts of trainings by
    the draft that was trained.

    converted are plans of drafts that do not stay as they are. left_out are sentences on drafts
    that do not come along.
    """

    drafts: Mapping[str, Checkpoint] = field(default_factory=dict)
    trainings: Mapping[str, Any] = field(default_factory=dict)
    converted: Mapping[str, PartPlan] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, bundle: Path | None, part: Part) -> Self:
        """Return what bundles with one or both parts of a bundle keep; nothing without a bundle.

        Raises InvalidInputError for a draft that is damaged or elsewhere, IoError.
        """
        if bundle is None:
            return cls()
        folders, trainings = draft_folders(bundle), trainings_of(bundle)
        if part is not Part.BOTH:
            kept = {MTP} if part is Part.MTP else set()
            why = "drafts in folders of their own go with --part both"
            left_out = dict.fromkeys(folders.values(), why)
            drafts = {}
        else:
            left_out = dict(_without_weights(bundle, folders))
            names = [name for name, folder in folders.items() if folder not in left_out]
            drafts = {name: open_draft(bundle, name) for name in names}
            kept = {MTP, *drafts}
        sentences = (f"{folder} is left out: {why}." for folder, why in left_out.items())
        return cls(
            drafts=drafts,
            trainings={name: facts for name, facts in trainings.items() if name in kept},
            left_out=tuple(sentences),
        )

    @property
    def shards(self) -> tuple[ShardHeader, ...]:
        """Shards of all drafts."""
        return tuple(shard for draft in self.drafts.values() for shard in draft.shards)

    @property
    def parts(self) -> tuple[PartPlan, ...]:
        """Plans of the drafts' folders: all shards as they are, unless they are converted."""
        kept = {
            name: replace(
                kept_part(name, draft, f"{name}."),
                extra_files=extra_files(draft),
                files=draft.files,
            )
            for name, draft in self.drafts.items()
        }
        return tuple({**kept, **self.converted}.values())

    def recorded(self) -> dict[str, Any]:
        """Return the manifest's option."""
        return {"tune": dict(self.trainings)} if self.trainings else {}

    def beside(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with the drafts' tensors, whose configs are part of its identity."""
        if not self.drafts:
            return checkpoint
        configs = [checkpoint.config_sha256, *(one.config_sha256 for one in self.drafts.values())]
        digest = hashlib.sha256("".join(configs).encode()).hexdigest()
        return replace(checkpoint.with_shards(self.shards), config_sha256=digest)


def trainings_of(place: Place | None) -> dict[str, Any]:
    """Return what a bundle's manifest records of trainings, by draft; nothing for another place.

    Raises what read_manifest does.
    """
    if not isinstance(place, Path) or not (place / MANIFEST_NAME).is_file():
        return {}
    trainings: dict[str, Any] = read_manifest(place)["options"].get("tune", {})
    return trainings


def open_draft(bundle: Path, method: str) -> Checkpoint:
    """Open a bundle's extra draft, its tensors under names that no part of the model has: with the
    method and a dot before them.

    Raises InvalidInputError for one that is damaged or elsewhere, IoError.
    """
    LocalFolder(bundle).resolved(method)
    return under_method(Checkpoint.open(bundle / method), method)


def under_method(draft: Checkpoint, method: str) -> Checkpoint:
    """Return a draft's checkpoint, its tensors with the method and a dot before their names."""
    shards = (
        replace(shard, tensors=tuple(t._replace(name=f"{method}.{t.name}") for t in shard.tensors))
        for shard in draft.shards
    )
    return replace(draft, shards=tuple(shards))


def kept_part(name: str, source: Checkpoint, prefix: str = "") -> PartPlan:
    """Return the plan of a part with the shards that a bundle has of it; its tensors are named
    without the prefix."""
    shards = (kept_shard(shard, prefix) for shard in source.shards)
    return PartPlan(name, tuple(shards), config=source.config, extra_files=())


def kept_shard(shard: ShardHeader, prefix: str = "") -> OutputShard:
    """Return a whole shard of a bundle, under the name that it has there."""
    steps = tuple(copy_step(one, one.name.removeprefix(prefix)) for one in shard.tensors)
    return OutputShard(steps, linked_from=shard, file_name=shard.path.name)


def _without_weights(bundle: Path, folders: Mapping[str, Path]) -> Iterator[tuple[Path, str]]:
    """Yield the folders that no checkpoint can be read from, as Medusa's file of heads, and why;
    one that the manifest lists has lost its weights, and is not among them."""
    listed: Mapping[str, Any] = {}
    if (bundle / MANIFEST_NAME).is_file():
        listed = read_manifest(bundle)["parts"]
    why = f"it has no weights in a format of {', '.join(CONTAINERS)}; copy it beside main/ and mtp/"
    for name, folder in folders.items():
        source = LocalFolder(folder)
        if name not in listed and not any(kind.probe(source) for kind in CONTAINERS.values()):
            yield folder, why
