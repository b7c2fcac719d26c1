"""Groups of a compressed-tensors config that describe a quantized draft beside a main model."""

from __future__ import annotations

from mtp_checkpoints.families.base import ModelFamily, Role
from mtp_checkpoints.formats import FORMATS
from mtp_checkpoints.formats.storage import Storage
from mtp_checkpoints.quantization.methods.compressed import REGEX, below, ignoring
from mtp_checkpoints.quantization.native import Config
from mtp_export.schemes.conversion import Conversion

_GROUPS, _LAYOUT, _MIXED = "config_groups", "format", "mixed-precision"


def with_draft_groups(quantization: Config, family: ModelFamily, mtp: Conversion) -> Config:
    """Return a config with a group, before all others, for each storage of a draft's linears; its
    other matrices are left out."""
    ours = {
        f"mtp_{storage}": {
            "targets": _linears(family, mtp, storage),
            **FORMATS[storage](mtp.options).group(activations_fp8=mtp.int4_activations_fp8),
        }
        for storage in dict.fromkeys(mtp.storages.values())
        if storage is not Storage.BF16
    }
    usual = quantization.get(_LAYOUT)
    theirs = {
        name: {**group, _LAYOUT: group.get(_LAYOUT) or usual}
        for name, group in quantization[_GROUPS].items()
    }
    groups = {**ours, **theirs}
    layouts = {group[_LAYOUT] for group in groups.values()}
    of_draft = [name for name in family.patterns.other_matrices if name.startswith(REGEX)]
    single = [below(name) for name in _plain_linears(family, mtp)]
    plain = [*of_draft, *single, *_linears(family, mtp, Storage.BF16)]
    left_out = ignoring(quantization, plain)
    layout = usual if layouts == {usual} else _MIXED
    return {**left_out, _LAYOUT: layout, _GROUPS: groups}


def _linears(family: ModelFamily, mtp: Conversion, storage: Storage) -> list[str]:
    """Return patterns for the draft's linears in a storage, fused ones included.

    Engines build no dense MLP in an MTP layer.
    """
    return [
        f"{REGEX}{layer}.{modules}"
        for role, modules in family.patterns.linears.items()
        if mtp.storages[role] is storage and role is not Role.DENSE_MLP
        for layer in _layers(family)
    ]


def _plain_linears(family: ModelFamily, mtp: Conversion) -> list[str]:
    """Return the draft's linears that are not quantized though others of their role are, by each
    name that engines have for them."""
    linears = (spec for spec in family.tensors.values() if spec.is_linear_weight)
    plain = (
        spec.module.removeprefix(f"model.layers.{spec.mtp_layer}.")
        for spec in linears
        if spec.mtp_layer is not None
        and mtp.storages[spec.role] is not Storage.BF16
        and mtp.storage_of(spec) in (None, Storage.BF16)
    )
    layers = _layers(family)
    return list(dict.fromkeys(f"{layer}.{module}" for module in plain for layer in layers))


def _layers(family: ModelFamily) -> list[str]:
    """Return the names of the MTP layers in the release and in engines."""
    return [*(f"model.layers.{layer}" for layer in family.mtp_layers), *family.patterns.mtp_names]
