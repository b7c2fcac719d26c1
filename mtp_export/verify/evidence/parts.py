"""The main and the MTP part of what is verified, a bundle's folders or the tensors of a checkpoint:
as opened, and the tensors that each must hold by its config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.signs import main_layers, mtp_modules
from mtp_checkpoints.layouts import TARGETS
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.absent import as_engines_take
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.sources.byte_source import ByteSource, Place, local_path
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, RELEASED
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.weights.weight_values import weights_on_disk
from mtp_export.progress import format_bytes


@dataclass(frozen=True)
class Part:
    """The main or the MTP part: its tensors as a checkpoint, or what opening it raised.

    place is the part's own folder in a bundle, and that of the whole checkpoint otherwise.
    """

    name: str
    place: Place
    checkpoint: Checkpoint | None
    error: Exception | None = None

    @property
    def folder(self) -> Path:
        """Folder of the part (UnsupportedError for a remote one)."""
        return local_path(self.place)

    @classmethod
    def open(cls, name: str, folder: Path) -> Part:
        """Read the part's config, index and headers; check `files` reports what that raises."""
        try:
            return cls(name, folder, Checkpoint.open(folder))
        except Exception as error:
            return cls(name, folder, checkpoint=None, error=error)


def parts_of_checkpoint(source: ByteSource) -> tuple[Part, ...]:
    """Return the parts of a checkpoint: main and MTP by the names of its tensors, or the one that
    it holds. A draft in another target's layout is an MTP part."""
    try:
        checkpoint = Checkpoint.read_from(source)
    except Exception as error:
        return (Part(MAIN, source.path, checkpoint=None, error=error),)
    layers = main_layers(checkpoint.config)
    if layers == 1 and likely_target(checkpoint, layers).name != RELEASED:
        return (Part(MTP, source.path, checkpoint),)
    modules = mtp_modules(checkpoint.tensors, layers)
    own = {name for module in modules for name in module.tensors}
    parts = {MAIN: checkpoint.tensors.keys() - own, MTP: own}
    return tuple(
        Part(name, source.path, _of_tensors(checkpoint, names))
        for name, names in parts.items()
        if names
    )


def _of_tensors(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Return a checkpoint as if it held some of its tensors alone."""
    kept = (
        replace(shard, tensors=tuple(tensor for tensor in shard.tensors if tensor.name in names))
        for shard in checkpoint.shards
    )
    return replace(checkpoint, shards=tuple(shard for shard in kept if shard.tensors))


@dataclass(frozen=True)
class PartLayout:
    """An opened part, and what it must hold."""

    name: str
    checkpoint: Checkpoint
    stored: StoredModel


def layout_of(part: Part, target: Target, main_layers: int) -> PartLayout:
    """Tensors that an opened part must hold, its draft named for a target.

    Raises what stored_model and stored_draft raise for a config that cannot be followed.
    """
    assert part.checkpoint is not None, "asked for a part that could not be opened"
    config = as_engines_take(part.checkpoint.config, part.checkpoint.tensors)
    if part.name == MAIN:
        return PartLayout(part.name, part.checkpoint, stored_model(config).main)
    stored = target.stored_draft(config, main_layers)
    return PartLayout(part.name, part.checkpoint, stored)


def likely_target(mtp: Checkpoint | None, main_layers: int) -> Target:
    """The target whose names most tensors of a draft have."""

    def known_names(target: Target) -> int:
        if mtp is None:
            return 0
        try:
            stored = target.stored_draft(mtp.config, main_layers)
        except MtpExportError:
            return 0
        return len(stored.tensors.keys() & mtp.tensors.keys())

    return max(TARGETS.values(), key=known_names)


def layer_count(checkpoints: Iterable[Checkpoint]) -> int:
    """The main model's num_hidden_layers, as far as the parts tell."""
    for checkpoint in checkpoints:
        layers = checkpoint.config.get("num_hidden_layers")
        if type(layers) is int and layers > 0:
            return layers
    return 1


_MEMINFO = Path("/proc/meminfo")
_DENSE_BYTES = 4  # the runtime holds every weight in fp32


def dense_bytes(layouts: Iterable[PartLayout]) -> int:
    """Bytes of all weights in fp32, whatever form they are stored in."""
    return _DENSE_BYTES * sum(
        prod(weight.stored.weight.shape)
        for layout in layouts
        for weight in weights_on_disk(layout.stored, layout.checkpoint.tensors)
    )


def available_bytes() -> int | None:
    """Memory available to new work without swapping, None if the system does not tell."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def why_too_large(layouts: Iterable[PartLayout]) -> str | None:
    """The reason why the model does not fit into memory, None if it does."""
    needed, available = dense_bytes(layouts), available_bytes()
    if available is None or needed < available:
        return None
    return (
        f"the weights take {format_bytes(needed)} in fp32 and {format_bytes(available)} of memory"
        " are free: use --stream"
    )
