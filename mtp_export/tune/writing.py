"""The tuned bundle: the source bundle with the trained weights in place of its own, each in the
format that the bundle stores it in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from mtp_export.bundle.build import BundlePlan
from mtp_export.bundle.extra_files import extra_files
from mtp_export.bundle.links import resolve_links
from mtp_export.bundle.options import BundleOptions, ContentOptions, RunOptions
from mtp_export.bundle.preflight import check_disk
from mtp_export.checkpoint.bundle_folder import (
    MAIN,
    MTP,
    RELEASED,
    BundleParts,
    bundle_target,
    is_bundle,
    open_parts,
)
from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.dtypes import torch_dtype
from mtp_export.checkpoint.files import make_folder
from mtp_export.checkpoint.header import ShardHeader, TensorInfo, read_header
from mtp_export.checkpoint.local_folder import LocalFolder
from mtp_export.checkpoint.manifest import read_manifest
from mtp_export.checkpoint.plan import COPY, Link, OutputShard, OutputTensor, PartPlan, Step
from mtp_export.checkpoint.reader import SINGLE_NAME, Checkpoint
from mtp_export.checkpoint.writer import ShardWriter
from mtp_export.errors import InvalidInputError, UnsupportedError
from mtp_export.schemes.conversion import keep_step
from mtp_export.schemes.formats import UNQUANTIZED
from mtp_export.schemes.stored import StoredModel, StoredWeight, stored_model
from mtp_export.schemes.transforms import Convert
from mtp_export.tune.draft import TrainedDraft
from mtp_export.tune.options import TuneOptions

_TUNED = "tuned"


@dataclass(frozen=True)
class SourceBundle:
    """The bundle that is tuned: its parts, what they hold, and the options of its manifest."""

    folder: Path
    main: Checkpoint
    mtp: Checkpoint
    stored: StoredModel
    recorded: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a bundle of both parts under released names.

        Raises InvalidInputError for another folder, UnsupportedError for another layout.
        """
        parts = _parts(folder)
        assert parts.mtp is not None, "is_bundle looked for it"
        main, mtp = stored_model(parts.main.config).main, stored_model(parts.mtp.config).mtp
        stored = StoredModel(main.family, main.quantization, {**main.weights, **mtp.weights})
        recorded = read_manifest(folder)["options"]
        return cls(folder, parts.main, parts.mtp, stored=stored, recorded=recorded)

    @property
    def scale_rule(self) -> str:
        """Rule by which int4 scales were chosen."""
        return str(self.recorded.get("scale", "minmax"))

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
    return open_parts(folder)


@dataclass(frozen=True)
class TunedCheckpoint(Checkpoint):
    """A bundle's tensors, and the trained ones under names of their own."""

    trained: ShardHeader | None = None

    @classmethod
    def of(cls, source: SourceBundle, trained: ShardHeader) -> Self:
        """Join a bundle and the shard of trained tensors."""
        return cls(
            path=source.folder,
            config=source.main.config,
            config_sha256=source.digest,
            shards=source.main.shards + source.mtp.shards + (trained,),
            files=source.main.files,
            trained=trained,
        )

    def shard_name(self, shard: ShardHeader) -> str:
        if shard is self.trained:
            return f"{_TUNED}/{SINGLE_NAME}"
        return super().shard_name(shard)


def write_trained(folder: Path, draft: TrainedDraft) -> ShardHeader:
    """Write the trained weights as one shard, unless an earlier run did: those that are stored in a
    quantized format in float32, others as they are stored."""
    path = folder / SINGLE_NAME
    if not path.is_file():
        make_folder(folder)
        tensors = {name: _tensor(draft, name) for name in draft.names}
        with DiskQueue(2) as queue:
            writer = ShardWriter(path, [*tensors.values()], queue)
            try:
                for name, tensor in tensors.items():
                    value = draft.trained(name).to(torch_dtype(tensor.dtype)).cpu().contiguous()
                    data: Any = value.reshape(-1).view(torch.uint8).numpy()
                    writer.write(tensor.name, memoryview(data))
                writer.commit()
            finally:
                writer.discard()
    return read_header(LocalFolder(folder).file(SINGLE_NAME))


def _tensor(draft: TrainedDraft, name: str) -> OutputTensor:
    """Return a weight as it lies in the shard of trained ones."""
    stored = draft.source.stored(name)
    dtype = stored.tensors[0].dtypes[0] if len(stored.tensors) == 1 else "F32"
    return OutputTensor(f"{_TUNED}.{name}", dtype, stored.weight.shape)


def plan_tuned(
    options: TuneOptions, source: SourceBundle, trained: ShardHeader, facts: Mapping[str, Any]
) -> BundlePlan:
    """Plan the tuned bundle; facts are what the manifest records of the training."""
    checkpoint = TunedCheckpoint.of(source, trained)
    links = resolve_links(Link.AUTO, [s.path for s in source.main.shards], options.output_dir)
    files = extra_files(checkpoint)
    main = PartPlan(
        name=MAIN,
        shards=tuple(_kept(shard).linked_by(links, checked=False) for shard in source.main.shards),
        config=source.main.config,
        extra_files=files,
    )
    names = {tensor.name for tensor in trained.tensors}
    scheme = source.recorded.get("mtp_quant")
    shards = tuple(
        OutputShard(tuple(_steps(shard, source, names, scheme)), file_name=shard.path.name)
        for shard in source.mtp.shards
    )
    mtp = PartPlan(name=MTP, shards=shards, config=source.mtp.config, extra_files=files)
    plan = BundlePlan(
        options=BundleOptions(
            options.bundle,
            options.output_dir,
            content=ContentOptions(allow_untied=bool(source.recorded.get("allow_untied"))),
            run=RunOptions(overwrite=options.overwrite),
        ),
        checkpoint=checkpoint,
        stored=source.stored,
        parts=(main, mtp),
        recorded={**source.recorded, "tune": dict(facts)},
    )
    check_disk(options.output_dir, plan.disk_bytes)
    return plan


def _kept(shard: ShardHeader) -> OutputShard:
    steps = tuple(keep_step(tensor, tensor.name) for tensor in shard.tensors)
    return OutputShard(steps, linked_from=shard, file_name=shard.path.name)


def _steps(
    shard: ShardHeader, source: SourceBundle, trained: set[str], scheme: str | None
) -> Iterator[Step]:
    """Yield the steps of an MTP shard: a trained weight once for all of its tensors."""
    for tensor in shard.tensors:
        one = source.stored.weight_of[tensor.name]
        name = f"{_TUNED}.{one.weight.name}"
        if name not in trained:
            yield keep_step(tensor, tensor.name)
        elif tensor.name == one.tensors[0].name:
            yield _trained_step(one, tensor, name=name, rule=source.scale_rule, scheme=scheme)


def _trained_step(
    one: StoredWeight, tensor: TensorInfo, *, name: str, rule: str, scheme: str | None
) -> Step:
    """Return the step that writes a trained weight in its stored format."""
    if one.format == UNQUANTIZED:
        return Step(COPY, (name,), (OutputTensor(tensor.name, tensor.dtype, tensor.shape),))
    outputs = one.format.tensors(one.weight.name, one.weight.shape)
    return Step(Convert(one.format, rule, UNQUANTIZED), (name,), outputs, scheme=scheme)
