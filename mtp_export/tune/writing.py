"""The tuned bundle: the source bundle with the trained weights in place of its own, each in the
format that the bundle stores it in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch

from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.extra_files import extra_files
from mtp_export.bundle.links import resolve_links
from mtp_export.bundle.options import BundleOptions, ContentOptions
from mtp_export.bundle.preflight import check_disk
from mtp_export.bundle.tied_weights import TiedCopies
from mtp_export.checkpoint.bundle_folder import (
    MAIN,
    MTP,
    RELEASED,
    BundleParts,
    bundle_target,
    is_bundle,
    open_parts,
)
from mtp_export.checkpoint.direct_io import equal_bytes
from mtp_export.checkpoint.disk_queue import DiskQueue
from mtp_export.checkpoint.dtypes import dtype_name, torch_dtype
from mtp_export.checkpoint.files import make_folder
from mtp_export.checkpoint.header import ShardHeader, TensorInfo, read_header
from mtp_export.checkpoint.local_folder import LocalFolder
from mtp_export.checkpoint.manifest import read_manifest
from mtp_export.checkpoint.plan import (
    COPY,
    Link,
    OutputShard,
    OutputTensor,
    PartPlan,
    Step,
    copy_step,
    number_shards,
)
from mtp_export.checkpoint.reader import SINGLE_NAME, Checkpoint
from mtp_export.checkpoint.writer import ShardWriter
from mtp_export.errors import InvalidInputError, UnsupportedError
from mtp_export.families.moe_decoder import MoeDecoderFamily
from mtp_export.schemes.formats import UNQUANTIZED
from mtp_export.schemes.native import DTYPE_KEYS, QUANTIZATION
from mtp_export.schemes.stored import StoredModel, StoredWeight, stored_model
from mtp_export.schemes.transforms import Convert
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
    def family(self) -> MoeDecoderFamily:
        """Family of the model."""
        family = self.stored.family
        assert isinstance(family, MoeDecoderFamily), "there are no others"
        return family

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
    for key in sorted((main.keys() | mtp.keys()) - {QUANTIZATION, *DTYPE_KEYS}):
        if main.get(key) != mtp.get(key):
            raise InvalidInputError(
                "The parts of this bundle are not of one model",
                where=folder,
                expected=f"the same {key} in main/config.json and mtp/config.json",
                found=f"{main.get(key)!r:.200} and {mtp.get(key)!r:.200}",
                todo="Export the checkpoint again; mtp-export verify says what else differs",
            )
    return parts


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


@dataclass(frozen=True)
class Trained:
    """A tensor that was trained: its form in the shard of such tensors, and its value."""

    form: OutputTensor
    value: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Output:
    """The bundle to write.

    source is the bundle that is tuned, folder that of the trained tensors, facts are what the
    manifest records of the training.
    """

    options: TuneOptions
    source: SourceBundle
    folder: Path
    facts: Mapping[str, Any]

    def plan_mtp(self, names: Sequence[str], value: Callable[[str], torch.Tensor]) -> BundlePlan:
        """Plan the bundle with weights of the MTP part trained, each in its stored format."""
        source = self.source
        trained = self._shard([_trained(source, name, value) for name in names])
        scheme = source.recorded.get("mtp_quant")
        return self._plan(trained, self._mtp(set(names), scheme))

    def plan_draft(
        self, method: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> BundlePlan:
        """Plan the bundle with a draft in a folder of its own beside main and MTP part."""
        forms = {name: _form(name, tensor) for name, tensor in tensors.items()}
        trained = self._shard(
            [Trained(form, partial(_same, tensors[name])) for name, form in forms.items()]
        )
        steps = [
            Step(COPY, (_inside(name),), (OutputTensor(name, form.dtype, form.shape),))
            for name, form in forms.items()
        ]
        shards = number_shards([OutputShard(tuple(steps))])
        draft = PartPlan(name=method, shards=shards, config=dict(config), extra_files=())
        return self._plan(trained, self._mtp(set(), None), draft)

    def _shard(self, tensors: Sequence[Trained]) -> ShardHeader:
        """Write trained tensors as one shard, unless an earlier run did."""
        written = _written(self.folder, tensors)
        if written is not None:
            return written
        make_folder(self.folder)
        with DiskQueue(2) as queue:
            path = self.folder / SINGLE_NAME
            writer = ShardWriter(path, [tensor.form for tensor in tensors], queue)
            try:
                for tensor in tensors:
                    writer.write(tensor.form.name, _bytes_of(tensor))
                writer.commit()
            finally:
                writer.discard()
        return _header(self.folder)

    def _mtp(self, trained: set[str], scheme: str | None) -> PartPlan:
        """Return the MTP part, its shards as they were but for trained weights."""
        source = self.source
        shards = tuple(
            OutputShard(tuple(_steps(shard, source, trained, scheme)), file_name=shard.path.name)
            for shard in source.mtp.shards
        )
        return PartPlan(MTP, shards, config=source.mtp.config, extra_files=())

    def _plan(self, trained: ShardHeader, *parts: PartPlan) -> BundlePlan:
        """Return the plan of the main part, linked, and of others."""
        options, source = self.options, self.source
        checkpoint = TunedCheckpoint.of(source, trained)
        links = resolve_links(Link.AUTO, [s.path for s in source.main.shards], options.output_dir)
        kept = (_kept(shard).linked_by(links, checked=False) for shard in source.main.shards)
        main = PartPlan(MAIN, tuple(kept), config=source.main.config, extra_files=())
        files = extra_files(checkpoint)
        own = {part.name: part for part in (main, *parts)}
        for name in (MAIN, MTP):
            own[name] = replace(own[name], extra_files=files)
        content = ContentOptions(allow_untied=source.allows_untied)
        plan = BundlePlan(
            options=BundleOptions(
                options.bundle,
                options.output_dir,
                content=content,
                run=options.run,
            ),
            checkpoint=checkpoint,
            stored=source.stored,
            parts=tuple(own.values()),
            recorded={**source.recorded, "tune": dict(self.facts)},
        )
        check_disk(options.output_dir, plan.disk_bytes)
        return plan


def _header(folder: Path) -> ShardHeader:
    return read_header(LocalFolder(folder).file(SINGLE_NAME))


def _written(folder: Path, tensors: Sequence[Trained]) -> ShardHeader | None:
    """Return the shard that an earlier run wrote, if it holds these tensors byte by byte."""
    path = folder / SINGLE_NAME
    if not path.is_file():
        return None
    try:
        header = _header(folder)
    except InvalidInputError:
        return None
    found = {tensor.name: tensor for tensor in header.tensors}
    forms = {tensor.form.name: (tensor.form.dtype, tensor.form.shape) for tensor in tensors}
    if forms != {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}:
        return None
    with path.open("rb") as file:
        for tensor in tensors:
            one = found[tensor.form.name]
            file.seek(one.offset_bytes)
            if not equal_bytes(memoryview(file.read(one.size_bytes)), _bytes_of(tensor)):
                return None
    return header


def _inside(name: str) -> str:
    """Return the name that a trained tensor has among those of the bundle that is tuned."""
    return f"{_TUNED}.{name}"


def _form(name: str, tensor: torch.Tensor) -> OutputTensor:
    return OutputTensor(_inside(name), dtype_name(tensor.dtype), tuple(tensor.shape))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _trained(source: SourceBundle, name: str, value: Callable[[str], torch.Tensor]) -> Trained:
    """Return a weight of the MTP part: in float32 where it is still to be quantized."""
    stored = source.stored.weights[name]
    dtype = "F32"
    if len(stored.tensors) == 1:
        dtype = source.mtp.tensors[stored.tensors[0].name].dtype
    return Trained(OutputTensor(_inside(name), dtype, stored.weight.shape), partial(value, name))


def _bytes_of(tensor: Trained) -> memoryview:
    whole = tensor.value().detach().to(torch_dtype(tensor.form.dtype)).cpu().contiguous()
    data: Any = whole.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _kept(shard: ShardHeader) -> OutputShard:
    steps = tuple(copy_step(tensor) for tensor in shard.tensors)
    return OutputShard(steps, linked_from=shard, file_name=shard.path.name)


def _steps(
    shard: ShardHeader, source: SourceBundle, trained: set[str], scheme: str | None
) -> Iterator[Step]:
    """Yield the steps of an MTP shard: a trained weight once for all of its tensors."""
    for tensor in shard.tensors:
        one = source.stored.weight_of[tensor.name]
        if one.weight.name not in trained:
            yield copy_step(tensor)
        elif tensor.name == one.tensors[0].name:
            yield _trained_step(one, tensor, rule=source.scale_rule, scheme=scheme)


def _trained_step(one: StoredWeight, tensor: TensorInfo, *, rule: str, scheme: str | None) -> Step:
    """Return the step that writes a trained weight in its stored format."""
    name = _inside(one.weight.name)
    if one.format == UNQUANTIZED:
        return Step(COPY, (name,), (OutputTensor(tensor.name, tensor.dtype, tensor.shape),))
    outputs = one.format.tensors(one.weight.name, one.weight.shape)
    return Step(Convert(one.format, rule, UNQUANTIZED), (name,), outputs, scheme=scheme)
