"""Both checkpoints of a graft, compared with each other: a main model that others quantized, and
the one with the MTP layer that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.signs import main_layers, mtp_modules
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.tensors.grafted import GraftedCheckpoint
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.untied_head import with_head_like
from mtp_export.bundle.export import Opened, viewed
from mtp_export.bundle.same_model import check_same_model, with_mtp_layers


@dataclass(frozen=True)
class GraftSources:
    """A main model and a checkpoint with its MTP layer, which are one model.

    config is the main model's, with the donor's number of MTP layers; own are the tensors of the
    main model's own MTP layers, which the donor's take the place of, each with its layer.
    """

    host: Checkpoint
    donor: Checkpoint
    donated: StoredModel
    config: dict[str, Any]
    own: Mapping[str, int]

    @classmethod
    def of(cls, host: Checkpoint, opened: Opened, *, replace: bool) -> Self:
        """Compare the main model with the donor as it was opened.

        Raises InvalidInputError for another model, and for a main model that has an MTP layer,
        unless it is to be replaced.
        """
        donor, donated = viewed(with_head_like(opened[0], host), opened)
        config = with_mtp_layers(host.config, donor.config)
        check_same_model(host, config, donor)
        layer_of = family_of(config).mtp_layer_of
        layers = ((name, layer_of(name)) for name in host.tensors)
        own = _under_other_names(host) | {name: one for name, one in layers if one is not None}
        if own and not replace:
            raise _has_layers(host, own, donated.family.mtp[0].name)
        return cls(host, donor, donated, config, own)

    @property
    def main_tensors(self) -> dict[str, TensorInfo]:
        """Tensors of the main model by name."""
        return {name: one for name, one in self.host.tensors.items() if name not in self.own}

    def check_main(self, main: StoredModel) -> None:
        """Refuse a main model without exactly its own tensors (InvalidInputError)."""
        problems = main.differences(self.main_tensors)
        if problems:
            problems[0].raise_as_error(self.host.path, len(problems) - 1)

    def joined(self) -> GraftedCheckpoint:
        """Return both as one checkpoint: the donor's tensors are those of its MTP layers, and its
        main embedding and head where the layers have no copies of their own."""
        names = self.donor.tensors.keys() & self.donated.mtp.tensors.keys()
        moved = {name: name for name in self.donor.tensors if name in names}
        for pair in self.donated.family.shared:
            if pair.mtp_name not in moved:
                moved[pair.mtp_name] = pair.main_name
        return GraftedCheckpoint.of(self.host.as_written, self.donor, self.config, moved, self.own)


def _under_other_names(host: Checkpoint) -> dict[str, int]:
    """Return what is an MTP layer's by any family's names, each with the layer."""
    modules = mtp_modules(host.tensors, main_layers(host.config))
    return {name: module.number or 0 for module in modules for name in module.tensors}


def _has_layers(host: Checkpoint, own: Mapping[str, int], module: str) -> InvalidInputError:
    first = next(iter(own))
    return InvalidInputError(
        "The main model has an MTP layer already",
        where=host.path,
        expected=f"no tensor of {module}",
        found=f"{first} ({len(own) - 1} more)",
        todo="Serve it as it is, split it with mtp-export --input-dir, or give --replace to graft"
        " the other layer in its place",
    )
