"""The main and the MTP part of what is verified, a bundle's folders or the tensors of a checkpoint:
as opened, and the tensors that each must hold by its config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mtp_checkpoints.containers import is_checkpoint
from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError, MtpExportError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.signs import main_layers, mtp_modules
from mtp_checkpoints.layouts import TARGETS, likely_target, target_of_format
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.absent import as_engines_take
from mtp_checkpoints.quantization.mismatches import Mismatch
from mtp_checkpoints.quantization.single_experts import one_by_one
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.sources.addresses import byte_source
from mtp_checkpoints.sources.byte_source import ByteSource, Place, local_path
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, RELEASED
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME, manifest_sha256, read_manifest
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.verify.evidence.as_named import as_named

TABLES = "tables beside mtp"


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
    names = checkpoint.tensors.keys()
    if layers == 1 and likely_target(checkpoint.config, names, layers).name != RELEASED:
        return (Part(MTP, source.path, checkpoint),)
    return in_one(source.path, checkpoint)


def in_one(place: Place, checkpoint: Checkpoint) -> tuple[Part, ...]:
    """Return the parts that lie in one place, or the one that does."""
    modules = mtp_modules(checkpoint.tensors, main_layers(checkpoint.config))
    own = {name for module in modules for name in module.tensors}
    parts = {MAIN: checkpoint.tensors.keys() - own, MTP: own}
    return tuple(
        Part(name, place, checkpoint.of_tensors(names)) for name, names in parts.items() if names
    )


def are_in_one_place(parts: Sequence[Part]) -> bool:
    """Return whether the MTP part lies in the main part's files."""
    return len({part.place for part in parts}) < len(parts)


@dataclass(frozen=True)
class OpenedPlace:
    """A bundle or a checkpoint as far as it could be opened: files of the folder or repository, and
    the parts; the manifest is a bundle's alone, and manifest_error is what reading it raised.
    beside: what lies under the main model's names beside an MTP part of another place."""

    files: ByteSource
    is_bundle: bool
    parts: tuple[Part, ...]
    manifest: Mapping[str, Any] | None = None
    manifest_sha256: str | None = None
    manifest_error: Exception | None = None
    beside: Part | None = None
    _layouts: dict[str, PartLayout] = field(default_factory=dict)

    def part(self, name: str) -> Part | None:
        """The part of a name, None if the bundle has no such folder."""
        return next((part for part in self.parts if part.name == name), None)

    def recorded(self, option: str) -> Any:
        """An option of the export by its key in the manifest; None if it has no such key."""
        return self.recorded_options.get(option)

    @property
    def recorded_options(self) -> Mapping[str, Any]:
        """The options of the export that the manifest records."""
        options: Mapping[str, Any] = (self.manifest or {}).get("options", {})
        return options

    @cached_property
    def by_names(self) -> Self:
        """The checkpoint as `as_named` has it, itself where its quantization is read."""
        if self.is_bundle or self.main is None or len({part.place for part in self.parts}) > 1:
            return self
        named = as_named(self.main.with_shards(self.mtp.shards if self.mtp else ()))
        return (
            self if named is None else replace(self, parts=in_one(named.path, named), _layouts={})
        )

    @cached_property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """Checkpoints of the parts that could be opened, by name."""
        opened = ((part.name, part.checkpoint) for part in self.parts)
        return {name: checkpoint for name, checkpoint in opened if checkpoint is not None}

    @property
    def main(self) -> Checkpoint | None:
        return self.checkpoints.get(MAIN)

    @property
    def mtp(self) -> Checkpoint | None:
        return self.checkpoints.get(MTP)

    @cached_property
    def target(self) -> Target:
        """The recorded target, else the only one of the files' format, else the likely one."""
        name = self.recorded("target")
        if isinstance(name, str) and name in TARGETS:
            return TARGETS[name]
        formats = {shard.container for one in self.checkpoints.values() for shard in one.shards}
        if (only := target_of_format(formats)) is not None or self.mtp is None:
            return only or TARGETS[RELEASED]
        layers = layer_count(self.checkpoints.values())
        return likely_target(self.mtp.config, self.mtp.tensors.keys(), layers)

    def layout(self, part: Part) -> PartLayout:
        """The tensors that an opened part must hold.

        Raises what stored_model and stored_draft raise for a config that cannot be followed.
        """
        if part.name not in self._layouts:
            layers = layer_count(self.checkpoints.values())
            self._layouts[part.name] = layout_of(part, self.target, layers)
        return self._layouts[part.name]

    @cached_property
    def layouts(self) -> tuple[PartLayout, ...]:
        """The layouts of the parts whose configs can be followed; check `files` says why another
        cannot."""
        found = []
        for part in self.parts:
            if part.checkpoint is not None:
                try:
                    found.append(self.layout(part))
                except MtpExportError:
                    continue
        return tuple(found)

    @cached_property
    def read_layouts(self) -> tuple[PartLayout, ...]:
        """The layouts of the parts whose bytes are read: of a remote place, the MTP part's."""
        local = {part.name for part in self.parts if isinstance(part.place, Path)}
        return tuple(one for one in self.layouts if one.name == MTP or one.name in local)

    @cached_property
    def tables_beside(self) -> PartLayout | None:
        """The embedding and head of what lies beside the MTP part, on this machine; None without
        any whose config can be followed."""
        if self.beside is None or not isinstance(self.beside.place, Path):
            return None
        try:
            layout = layout_of(self.beside, self.target, main_layers=1)
        except MtpExportError:
            return None
        tables = layout.stored.of_tensors(lambda spec: spec.role in (Role.EMBEDDING, Role.HEAD))
        return replace(layout, name=TABLES, stored=tables)

    @property
    def draft_apart(self) -> str:
        """The method of drafts that are a checkpoint of their own; "" of a model with MTP layers,
        and of a draft itself."""
        families = [one.stored.family for one in self.layouts if one.name == MAIN]
        targets = (one for one in families if one.drafts_apart and not one.uncomputed)
        return next((one.draft_method for one in targets), "")

    @property
    def why_no_module(self) -> str:
        """The reason why no MTP module is judged, "" where there is one."""
        method = self.draft_apart
        return f"drafts are made by the {method}, and there is no MTP module" if method else ""


def opened_place(place: Place, mtp: Place | None) -> OpenedPlace:
    """Open a bundle, or a checkpoint, with the MTP part of another where that is given.

    Raises InvalidInputError for a place without either, and what byte_source raises.
    """
    files = byte_source(place)
    if is_checkpoint(files):
        parts = parts_of_checkpoint(files)
        return OpenedPlace(files, False, parts) if mtp is None else _of_two(files, parts, mtp)
    folders = [local_path(place) / name for name in (MAIN, MTP)]
    if mtp is not None or not any(folder.is_dir() for folder in folders):
        raise InvalidInputError(
            "There is neither a bundle nor a checkpoint here"
            if mtp is None
            else "There is no checkpoint here to go with an MTP layer of another place",
            where=place,
            expected=f"a folder with {MAIN}/, {MTP}/ and {MANIFEST_NAME}, or a checkpoint with"
            f" {CONFIG_NAME} and its weights",
            todo="Point at the output folder of an export, or at a Hugging Face checkpoint",
        )
    parts = tuple(Part.open(one.name, one) for one in folders if one.is_dir())
    (first, *others) = parts
    if first.name == MAIN and not others and first.checkpoint is not None:
        parts = in_one(first.place, first.checkpoint)
    bundle = local_path(place)
    try:
        return OpenedPlace(files, True, parts, read_manifest(bundle), manifest_sha256(bundle))
    except Exception as error:  # check `files` reports it
        return OpenedPlace(files, True, parts, manifest_error=error)


def _of_two(files: ByteSource, parts: Sequence[Part], mtp: Place) -> OpenedPlace:
    """Return a checkpoint with the MTP part of another place in the place of its own."""
    given = parts_of_checkpoint(byte_source(mtp))
    drafts = [replace(one, name=MTP) for one in given if one.name == MTP or one.error]
    beside = next((one for one in given if drafts and one.name == MAIN and not one.error), None)
    mains = (part for part in parts if part.name == MAIN)
    return OpenedPlace(files, False, (*mains, *drafts), beside=beside)


@dataclass(frozen=True)
class PartLayout:
    """An opened part, and what it must hold."""

    name: str
    checkpoint: Checkpoint
    stored: StoredModel

    @cached_property
    def differences(self) -> list[Mismatch]:
        """Every difference between the tensors that are there and those that must be."""
        return self.stored.differences(self.checkpoint.tensors)

    @cached_property
    def apart(self) -> PartLayout:
        """The part as if experts that are stored fused were stored one by one."""
        return PartLayout(self.name, *one_by_one(self.checkpoint, self.stored))


def layout_of(part: Part, target: Target, main_layers: int) -> PartLayout:
    """Tensors that an opened part must hold, its draft named for a target.

    Raises what stored_model and stored_draft raise for a config that cannot be followed.
    """
    assert part.checkpoint is not None, "asked for a part that could not be opened"
    config = as_engines_take(part.checkpoint.config, part.checkpoint.tensors)
    if part.name == MAIN:
        names = part.checkpoint.tensors
        return PartLayout(part.name, part.checkpoint, stored_model(config, names).main)
    stored = target.stored_draft(config, main_layers, part.checkpoint.tensors)
    return PartLayout(part.name, part.checkpoint, stored)


def layer_count(checkpoints: Iterable[Checkpoint]) -> int:
    """The main model's num_hidden_layers, as far as the parts tell."""
    for checkpoint in checkpoints:
        if layers := main_layers(checkpoint.config):
            return layers
    return 1
