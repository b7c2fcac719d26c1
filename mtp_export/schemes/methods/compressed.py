"""compressed-tensors: modules are left out by `ignore`, and others get a group of their own.

Sources: vLLM and SGLang `quantization/compressed_tensors`. They look at `ignore` before groups, at
names before classes, and take the first name that matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtp_export.families.base import ModelFamily, Role
from mtp_export.schemes.conversion import Conversion
from mtp_export.schemes.formats import FORMATS
from mtp_export.schemes.native import Config
from mtp_export.schemes.storage import Storage

_IGNORE, _GROUPS, _LAYOUT = "ignore", "config_groups", "format"
_MIXED, _REGEX = "mixed-precision", "re:"


def left_out_of_compressed(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them."""
    return _ignoring(quantization, map(_below, modules))


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
    of_draft = [name for name in family.patterns.other_matrices if name.startswith(_REGEX)]
    single = [_below(name) for name in _plain_linears(family, mtp)]
    plain = [*of_draft, *single, *_linears(family, mtp, Storage.BF16)]
    ignoring = _ignoring(quantization, plain)
    layout = usual if layouts == {usual} else _MIXED
    return {**ignoring, _LAYOUT: layout, _GROUPS: groups}


def _ignoring(quantization: Config, patterns: Iterable[str]) -> Config:
    own = quantization.get(_IGNORE) or []
    return {**quantization, _IGNORE: list(dict.fromkeys([*own, *patterns]))}


def _below(module: str) -> str:
    """Return a pattern for a module and all below it.

    It stays unescaped: SGLang replaces a literal layer in it.
    """
    return rf"{_REGEX}{module}(\..*)?$"


def _linears(family: ModelFamily, mtp: Conversion, storage: Storage) -> list[str]:
    """Return patterns for the draft's linears in a storage, fused ones included.

    Engines build no dense MLP in an MTP layer.
    """
    return [
        f"{_REGEX}{layer}.{modules}"
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
