"""The tuned bundle: the source bundle with the trained weights in place of its own, each in the
format that the bundle stores it in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from mtp_checkpoints.containers import SAFETENSORS
from mtp_checkpoints.containers.base import SINGLE_NAME, ShardHeader, TensorInfo
from mtp_checkpoints.containers.safetensors_header import read_header
from mtp_checkpoints.dtypes import DType, OutputTensor, dtype_name, torch_dtype
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.quantization.stored import StoredWeight
from mtp_checkpoints.sources.disk_queue import DiskQueue
from mtp_checkpoints.sources.files import make_folder
from mtp_checkpoints.sources.local_folder import LocalFolder
from mtp_checkpoints.tensors.bundle_folder import (
    MAIN,
    MTP,
)
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.writer import ShardWriter
from mtp_export.bundle.bundle_plan import BundlePlan
from mtp_export.bundle.extra_files import extra_files
from mtp_export.bundle.links import resolve_links
from mtp_export.bundle.options import BundleOptions, ContentOptions
from mtp_export.bundle.preflight import check_disk
from mtp_export.bundle.tuning import kept_part, kept_shard
from mtp_export.plan import COPY, Link, OutputShard, PartPlan, Step, copy_step, number_shards
from mtp_export.schemes.transforms import Convert
from mtp_export.tune.options import TuneOptions
from mtp_export.tune.source_bundle import SourceBundle
from mtp_runtime.loading.draft_folder import write_tensors

_TUNED = "tuned"


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
            shards=(*source.shards, trained),
            files=source.main.files,
            trained=trained,
        )

    def shard_name(self, shard: ShardHeader) -> str:
        if shard is self.trained:
            return f"{_TUNED}/{SINGLE_NAME}"
        return super().shard_name(shard)


@dataclass(frozen=True)
class Trained:
    """A weight that was trained: its form in the shard of such weights, and its value."""

    form: OutputTensor
    value: Callable[[], torch.Tensor]

    def made(self) -> torch.Tensor:
        """Return the value in the dtype of its form."""
        return self.value().to(torch_dtype(self.form.dtype))


@dataclass(frozen=True)
class Output:
    """The bundle to write.

    source is the bundle that is tuned, folder that of the trained tensors, facts are what the
    manifest records of the training, beside those of other drafts.
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
        shards = (_retrained(shard, source, set(names), scheme) for shard in source.mtp.shards)
        mtp = PartPlan(MTP, tuple(shards), config=source.mtp.config, extra_files=())
        return self._plan(trained, mtp)

    def plan_draft(
        self, method: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> BundlePlan:
        """Plan the bundle with a draft in a folder of its own beside main and MTP part."""
        path, named = self.folder / SINGLE_NAME, {_inside(name): t for name, t in tensors.items()}
        if not _holds(path, named, named.__getitem__):
            make_folder(self.folder)
            write_tensors(path, named)
        steps = [
            Step(COPY, (_inside(name),), (OutputTensor(name, dtype_name(t.dtype), tuple(t.shape)),))
            for name, t in tensors.items()
        ]
        shards = number_shards([OutputShard(tuple(steps))])
        draft = PartPlan(name=method, shards=shards, config=dict(config), extra_files=())
        return self._plan(_header(self.folder), draft)

    def _shard(self, tensors: Sequence[Trained]) -> ShardHeader:
        """Write trained weights as one shard, unless an earlier run did: one after the other, since
        a low rank's whole values are made here."""
        path, made = self.folder / SINGLE_NAME, {one.form.name: one.made for one in tensors}
        if _holds(path, made, lambda name: made[name]()):
            return _header(self.folder)
        make_folder(self.folder)
        with DiskQueue(2) as queue:
            layout = SAFETENSORS.layout([tensor.form for tensor in tensors])
            writer = ShardWriter(path, layout, queue)
            try:
                for name, make in made.items():
                    data: Any = _bytes_of(make()).numpy()
                    writer.write(name, memoryview(data))
                writer.commit()
            finally:
                writer.discard()
        return _header(self.folder)

    def _plan(self, trained: ShardHeader, changed: PartPlan) -> BundlePlan:
        """Return the plan of a part that changed and of all others, which are linked."""
        options, source = self.options, self.source
        checkpoint = TunedCheckpoint.of(source, trained)
        whole = {MAIN: source.main, MTP: source.mtp, **source.drafts}
        kept = {
            name: kept_part(name, own, f"{name}." if name in source.drafts else "")
            for name, own in whole.items()
            if name != changed.name
        }
        files = extra_files(checkpoint)
        parts = kept | {changed.name: changed}
        for name in (MAIN, MTP):
            parts[name] = replace(parts[name], extra_files=files)
        links = resolve_links(Link.AUTO, [s.path for s in source.shards], options.output_dir)
        linked = [parts[name].linked_by(links, checked=name != MAIN) for name in {**whole, **parts}]
        plan = BundlePlan(
            options=BundleOptions(
                options.bundle,
                options.output_dir,
                content=ContentOptions(allow_untied=source.allows_untied),
                run=options.run,
            ),
            checkpoint=checkpoint,
            stored=source.stored,
            parts=tuple(linked),
            recorded={**self._kept(changed), "tune": self._trainings},
        )
        check_disk(options.output_dir, plan.disk_bytes)
        return plan

    def _kept(self, changed: PartPlan) -> dict[str, Any]:
        """Return the recorded options, without a calibration of codes that training replaces."""
        recorded = dict(self.source.recorded)
        if changed.name == MTP and "calibrate" in recorded:
            record = recorded.pop("calibrate")
            if MAIN in record.get("parts", ()):
                recorded["calibrate"] = {**record, "parts": [MAIN]}
        return recorded

    @property
    def _trainings(self) -> dict[str, Any]:
        """Facts of this training and of those of other drafts, by draft."""
        return {**self.source.recorded.get("tune", {}), self.options.draft: dict(self.facts)}


def _header(folder: Path) -> ShardHeader:
    return read_header(LocalFolder(folder).file(SINGLE_NAME))


def _holds(path: Path, names: Collection[str], value: Callable[[str], torch.Tensor]) -> bool:
    """Return True for a file of an earlier run that holds these tensors byte by byte."""
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) == set(names) and all(
                _is_same(file.get_tensor(name), value(name)) for name in names
            )
    except (OSError, SafetensorError):
        return False


def _is_same(held: torch.Tensor, made: torch.Tensor) -> bool:
    return (held.dtype, held.shape) == (made.dtype, made.shape) and torch.equal(
        _bytes_of(held), _bytes_of(made)
    )


def _inside(name: str) -> str:
    """Return the name that a trained tensor has among those of the bundle that is tuned."""
    return f"{_TUNED}.{name}"


def _trained(source: SourceBundle, name: str, value: Callable[[str], torch.Tensor]) -> Trained:
    """Return a weight of the MTP part: in float32 where it is still to be quantized."""
    stored = source.stored.weights[name]
    dtype = DType.F32
    if len(stored.tensors) == 1:
        dtype = source.mtp.tensors[stored.tensors[0].name].dtype
    return Trained(OutputTensor(_inside(name), dtype, stored.weight.shape), partial(value, name))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _retrained(
    shard: ShardHeader, source: SourceBundle, trained: set[str], scheme: str | None
) -> OutputShard:
    """Return an MTP shard with trained weights in place of its own; one without any is kept."""
    if not any(source.stored.weight_of[one.name].weight.name in trained for one in shard.tensors):
        return kept_shard(shard)
    steps = _steps(shard, source, trained, scheme)
    return OutputShard(tuple(steps), file_name=shard.path.name)


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
