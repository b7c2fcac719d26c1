"""SourceWeights of a bundle's weights in its source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import weight_name
from mtp_checkpoints.families.folds import folds_of
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.absent import with_plain_projections_listed
from mtp_checkpoints.quantization.stored import stored_model
from mtp_checkpoints.tensors.experts_apart import experts_apart
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_checkpoints.tensors.untied_head import with_untied_head
from mtp_checkpoints.weights.weight_values import WeightOnDisk, weights_on_disk
from mtp_export.bundle.folded_scales import folded_scales

if TYPE_CHECKING:
    from torch import Tensor

    from mtp_checkpoints.weights.folding import Folding


@dataclass(frozen=True)
class SourceWeights:
    """The weights of a source by their released names.

    main_names: a draft's embedding and head may be the main model's, by these names. Experts that
    the source fuses are there one by one too, and a head that is its embedding by its own name.
    """

    weights: Mapping[str, WeightOnDisk]
    main_names: Mapping[str, str]

    @classmethod
    def of(cls, source: Checkpoint, manifest: Mapping[str, Any] | None = None) -> SourceWeights:
        """Return the weights of a source, with the scales that a bundle's manifest records. Raises
        what check_decoded and stored_model raise."""
        source.check_decoded()
        family = family_of(source.config, source.tensors)
        whole = with_untied_head(source, family)
        apart = experts_apart(whole, family)
        weights = {
            weight.stored.weight.name: weight
            for one in ([whole] if apart is whole else [whole, apart])
            for config in [with_plain_projections_listed(one.config, one.tensors)]
            for weight in weights_on_disk(stored_model(config, one.tensors), one.tensors)
        }
        if scales := folded_scales(manifest or {}):
            from mtp_checkpoints.weights.folding import folded

            weights = folded(weights, _foldings(family_of(apart.config, apart.tensors), scales))
        shared = family.shared
        return cls(weights, {pair.mtp_name: pair.main_name for pair in shared})

    def find(self, weight: WeightOnDisk) -> WeightOnDisk | None:
        """Return the source's weight that one of a bundle was made of, None if it has none."""
        name = weight.stored.weight.name
        source = self.weights.get(name)
        original = self.weights.get(self.main_names.get(name, ""))
        if source is None or source.stored.format != weight.stored.format:
            source = original or source
        if source is None or source.stored.weight.shape != weight.stored.weight.shape:
            return None
        return source


def _foldings(family: ModelSpec, scales: Mapping[str, str]) -> dict[str, Folding]:
    """Return the scales in weights of layers: where a tensor is divided, all that takes what it
    makes is multiplied."""
    from mtp_checkpoints.weights.folding import Folding, of_letters

    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    layers = (*family.layers, *(mtp.layer for mtp in family.mtp))
    scaled = (layer for layer in layers if weight_name(layer.post_norm) in scales)
    for fold in (fold for layer in scaled for fold in folds_of(layer)):
        count = family.tensors[fold.divided].shape[0]
        exponents = of_letters(scales.get(fold.divided, ""), count)
        if exponents is not None:
            rows[fold.divided] = exponents
            columns |= dict.fromkeys(fold.multiplied, exponents)
    norms = {name for name in rows if len(family.tensors[name].shape) == 1}
    return {
        name: Folding(
            rows.get(name), columns.get(name), family.facts.norm_offset if name in norms else 0.0
        )
        for name in {*rows, *columns}
    }


def is_copy(weight: WeightOnDisk, source: WeightOnDisk) -> bool:
    """Return True if both are stored in the same form and orientation."""
    ours, theirs = (
        (w.stored.storage, w.stored.transposed, [(t.dtype, t.shape) for t in w.tensors])
        for w in (weight, source)
    )
    return ours == theirs


def is_linked(weight: WeightOnDisk, source: WeightOnDisk) -> bool:
    """Return True if both are the same bytes of the same files: those of linked shards."""
    return all(map(_is_same_place, weight.tensors, source.tensors))


def _is_same_place(one: TensorInfo, other: TensorInfo) -> bool:
    if one.offset_bytes != other.offset_bytes or one.size_bytes != other.size_bytes:
        return False
    paths = one.path, other.path
    try:
        return all(isinstance(path, Path) for path in paths) and os.path.samefile(*map(str, paths))
    except OSError:  # reading it says what is wrong
        return False
