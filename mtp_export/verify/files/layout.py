"""Parts of a bundle, each with what it must hold by its config.json and its target."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_export.checkpoint.reader import Checkpoint
from mtp_export.errors import MtpExportError
from mtp_export.schemes.stored import StoredModel, stored_model
from mtp_export.targets import TARGETS
from mtp_export.targets.base import Target
from mtp_export.targets.draft import stored_draft
from mtp_export.verify.context import MAIN, BundlePart, Context


@dataclass(frozen=True)
class PartLayout:
    """An opened part, and the tensors that it must hold."""

    name: str
    checkpoint: Checkpoint
    stored: StoredModel


def layout_of(context: Context, part: BundlePart) -> PartLayout:
    """Return what a part must hold; raises as stored_model for a config that cannot be followed."""
    assert part.checkpoint is not None, "asked for a part that could not be opened"
    config = part.checkpoint.config
    if part.name == MAIN:
        return PartLayout(part.name, part.checkpoint, stored_model(config).main)
    layers = main_layers(context)
    stored = stored_draft(config, target_of(context), layers)
    return PartLayout(part.name, part.checkpoint, stored)


def layouts(context: Context) -> list[PartLayout]:
    """Return the parts that are understood; check files says why another is not."""
    found = []
    for part in context.parts:
        if part.checkpoint is not None:
            try:
                found.append(layout_of(context, part))
            except MtpExportError:
                continue
    return found


def target_of(context: Context) -> Target:
    """Return the target in the manifest, else the one whose names most of the draft has."""
    name = context.recorded("target")
    if isinstance(name, str) and name in TARGETS:
        return TARGETS[name]
    return max(TARGETS.values(), key=lambda target: _known_names(context, target))


def _known_names(context: Context, target: Target) -> int:
    mtp = context.mtp
    if mtp is None:
        return 0
    try:
        stored = stored_draft(mtp.config, target, main_layers(context))
    except MtpExportError:
        return 0
    return len(stored.tensors.keys() & mtp.tensors.keys())


def main_layers(context: Context) -> int:
    """Return the main model's num_hidden_layers, as far as the bundle tells."""
    for checkpoint in context.checkpoints:
        layers = checkpoint.config.get("num_hidden_layers")
        if type(layers) is int and layers > 0:
            return layers
    return 1
