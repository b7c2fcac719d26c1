"""The bundle that is tuned: both parts under released names, and drafts beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mtp_checkpoints.containers.base import ShardHeader
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.native import DTYPE_KEYS, QUANTIZATION_FIELDS
from mtp_checkpoints.quantization.single_experts import one_by_one
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.tensors.bundle_folder import (
    RELEASED,
    BundleParts,
    bundle_target,
    is_bundle,
    open_parts,
)
from mtp_checkpoints.tensors.manifest import read_manifest
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.folded_scales import refuse_scales
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.bundle.tuning import open_draft
from mtp_runtime.drafters import draft_folders


@dataclass(frozen=True)
class SourceBundle:
    """The bundle that is tuned: its parts, what they hold, and the options of its manifest.

    drafts are those in folders of their own, by method. Fused experts of the MTP part are given one
    by one, as what is trained of them is written.
    """

    folder: Path
    main: Checkpoint
    mtp: Checkpoint
    drafts: Mapping[str, Checkpoint]
    stored: StoredModel
    recorded: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a bundle of both parts under released names.

        Raises InvalidInputError for another folder, UnsupportedError for another layout, or for
        scales that are folded in.
        """
        parts = _parts(folder)
        assert parts.mtp is not None, "is_bundle looked for it"
        main = stored_model(parts.main.config, parts.main.tensors)
        of_mtp = stored_model(parts.mtp.config, parts.mtp.tensors).mtp
        checkpoint, mtp = one_by_one(parts.mtp, of_mtp)
        stored = main.with_mtp_of(mtp, main.quantization)
        manifest = read_manifest(folder)
        refuse_scales(folder, manifest)
        return cls(
            folder,
            main=parts.main,
            mtp=checkpoint,
            drafts={name: open_draft(folder, name) for name in draft_folders(folder)},
            stored=stored,
            recorded=manifest["options"],
        )

    @property
    def family(self) -> ModelSpec:
        """Description of the model."""
        return self.stored.family

    @property
    def shards(self) -> tuple[ShardHeader, ...]:
        """Shards of both parts, and of drafts in folders of their own."""
        drafts = (shard for draft in self.drafts.values() for shard in draft.shards)
        return (*self.main.shards, *self.mtp.shards, *drafts)

    @property
    def scale_rule(self) -> str:
        """Rule by which int4 scales were chosen."""
        return str(self.recorded.get("scale", "minmax"))

    @property
    def allows_untied(self) -> bool:
        """True for a bundle whose MTP part may have another embedding and head than the model."""
        return bool(self.recorded.get("allow_untied"))

    def check_copies(self) -> None:
        """Refuse an MTP part whose embedding or head differ from the main model's: the bundle that
        is written refuses them too, after the training (InvalidInputError, IoError)."""
        if self.allows_untied:
            return
        checkpoint = Checkpoint(
            path=self.folder,
            config=self.main.config,
            config_sha256=self.digest,
            shards=self.main.shards + self.mtp.shards,
            files=self.main.files,
        )
        tied = TiedCopies.of(checkpoint, self.stored)
        with DiskQueue(2) as queue:
            tied.compare(checkpoint.tensors, tied.alike, queue, lambda: None)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all configs and headers."""
        shards = self.main.shards + self.mtp.shards
        parts = [self.main.config_sha256, self.mtp.config_sha256]
        parts += [f"{shard.header_sha256} {shard.version}" for shard in shards]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _parts(folder: Path) -> BundleParts:
    if not is_bundle(folder):
        raise InvalidInputError(
            "This is no bundle with a main and an MTP part",
            where=folder,
            expected="main/ and mtp/, as an export with --part both writes them",
            todo="Export the checkpoint first: mtp-export --input-dir --output-dir",
        )
    if (target := bundle_target(folder)) != RELEASED:
        raise UnsupportedError(
            "Bundles of this layout are not tuned",
            where=folder,
            expected=f"target {RELEASED}",
            found=f"target {target}",
            todo="Tune a bundle of --target hf, then export that for the engine",
        )
    parts = open_parts(folder)
    assert parts.mtp is not None, "is_bundle looked for it"
    main, mtp = parts.main.config, parts.mtp.config
    for key in sorted((main.keys() | mtp.keys()) - QUANTIZATION_FIELDS - {*DTYPE_KEYS}):
        if main.get(key) != mtp.get(key):
            raise InvalidInputError(
                "The parts of this bundle are not of one model",
                where=folder,
                expected=f"the same {key} in main/config.json and mtp/config.json",
                found=f"{main.get(key)!r:.200} and {mtp.get(key)!r:.200}",
                todo="Export the checkpoint again; mtp-export verify says what else differs",
            )
    return parts
