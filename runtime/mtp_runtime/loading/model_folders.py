"""Folders of a model, each compared with what its config.json promises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mtp_checkpoints.containers import is_checkpoint
from mtp_checkpoints.containers.base import CONFIG_NAME
from mtp_checkpoints.errors import InvalidInputError, UsageError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.signs import with_counts_of
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.layouts import likely_target, target_of_bundle
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.absent import as_engines_take
from mtp_checkpoints.quantization.single_experts import one_by_one
from mtp_checkpoints.quantization.stored import StoredModel, StoredWeight, stored_model
from mtp_checkpoints.sources.addresses import byte_source
from mtp_checkpoints.tensors.bundle_folder import RELEASED, open_parts
from mtp_checkpoints.tensors.reader import Checkpoint


@dataclass(frozen=True)
class ModelFolder:
    """A folder, and the tensors that its config.json promises."""

    checkpoint: Checkpoint
    stored: StoredModel

    def has(self, weight: StoredWeight) -> bool:
        return weight.tensors[0].name in self.checkpoint.tensors

    def check(self) -> None:
        """Refuse a folder that differs from its promise (InvalidInputError)."""
        problems = self.stored.differences(self.checkpoint.tensors)
        if problems:
            problems[0].raise_as_error(self.checkpoint.folder, len(problems) - 1)


def open_folders(
    path: Path, mtp: Path | None = None, *, with_mtp: bool = True
) -> list[ModelFolder]:
    """Open a bundle (main and mtp side by side) or a single checkpoint folder, and check it; the
    folder of the main part comes first. They are given as if they held fused experts one by one.

    The MTP folder may be in any target's layout. Raises InvalidInputError for a tensor that is
    missing, of the wrong shape or dtype, or not promised by config.json, UnsupportedError for a
    quantization or a type of weights that is not known. A checkpoint without any tensor of the MTP
    layer counts as the main part alone. mtp: a checkpoint whose MTP layer is taken, and none of the
    first folder's. with_mtp False: the MTP layer may be of a type that is not known, as nobody
    reads it.
    """
    if mtp is not None:
        folders = _apart(Checkpoint.open(path), Checkpoint.open(mtp))
    elif path.exists() and is_checkpoint(byte_source(path)):
        folders = [_whole(Checkpoint.open(path))]
    else:
        opened = open_parts(path)
        main = opened.main
        stored = stored_model(main.config, main.tensors)
        as_one = opened.mtp is None and main.tensors.keys() & stored.mtp.tensors.keys()
        folders = [ModelFolder(main, stored if as_one else stored.main)]
        if opened.mtp is not None:
            folders.append(_draft(opened.mtp, opened.main, target_of_bundle(path)))
    for folder in folders:
        folder.check()
    read = [folder.checkpoint for folder in folders]
    if not with_mtp:
        read = [_main_part(read[0], folders[0].stored.family)]
    for checkpoint in read:
        checkpoint.check_decoded()
    return [ModelFolder(*one_by_one(each.checkpoint, each.stored)) for each in folders]


def _apart(main: Checkpoint, mtp: Checkpoint) -> list[ModelFolder]:
    """Return the main part of one checkpoint and the MTP part of another, whose config may be the
    only one that counts its layers."""
    if not family_of(main.config).mtp:
        main = replace(main, config=with_counts_of(main.config, mtp.config))
    spec = family_of(main.config)
    target = likely_target(mtp.config, mtp.tensors.keys(), len(spec.layers))
    if target.name == RELEASED:
        mtp = mtp.of_tensors(name for name in mtp.tensors if spec.mtp_layer_of(name) is not None)
    taken = as_engines_take(main.config, main.tensors, experts=True)
    stored = stored_model(taken, main.tensors).main
    return [ModelFolder(_main_part(main, spec), stored), _draft(mtp, main, target)]


def _main_part(checkpoint: Checkpoint, family: ModelSpec) -> Checkpoint:
    return checkpoint.of_tensors(
        name for name in checkpoint.tensors if family.mtp_layer_of(name) is None
    )


def _whole(checkpoint: Checkpoint) -> ModelFolder:
    """Return a single folder as it is: main alone, or main and MTP."""
    config = as_engines_take(checkpoint.config, checkpoint.tensors, experts=True)
    stored = stored_model(config, checkpoint.tensors)
    if checkpoint.tensors.keys() & stored.mtp.tensors.keys():
        return ModelFolder(checkpoint, stored)
    return ModelFolder(checkpoint, stored.main)


def _draft(mtp: Checkpoint, main: Checkpoint, target: Target) -> ModelFolder:
    """Return the MTP folder of a bundle, which must hold the main model's MTP layers."""
    family = family_of(main.config, mtp.tensors)
    layers = {name: spec.shape for name, spec in family.mtp_tensors.items()}
    stored = target.stored_draft(mtp.config, len(family.layers), mtp.tensors)
    described = {name: weight.weight.shape for name, weight in stored.weights.items()}
    unlike = [name for name in {**layers, **described} if layers.get(name) != described.get(name)]
    if unlike:
        raise InvalidInputError(
            "The MTP folder's config describes other MTP layers than the main model's",
            where=mtp.folder / CONFIG_NAME,
            expected=f"{unlike[0]} {_shape(layers.get(unlike[0]))}",
            found=_shape(described.get(unlike[0])),
            todo="Export both parts from one checkpoint",
        )
    return ModelFolder(mtp, stored)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else str(list(shape))


def no_module_to_draft_with(path: Path) -> UsageError:
    """Return the error of options that ask for drafts of a model without MTP modules."""
    return UsageError(
        "The options ask for drafts, and there is no MTP module to draft with",
        where=path,
        expected="a bundle with main and mtp, or another speculate_method than auto",
    )
