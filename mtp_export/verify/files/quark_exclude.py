"""Quark's list of modules that are not quantized, compared with how the MTP modules are stored: all
that is told of numbers of its that are not read here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mtp_checkpoints.containers.base import CONFIG_NAME, QUANTIZATION, TensorInfo
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import FLOATS
from mtp_checkpoints.formats.base import SCALES_OF_CODES
from mtp_checkpoints.quantization.methods import undecoded_of
from mtp_checkpoints.quantization.methods.quark import entry_for, left_out
from mtp_checkpoints.quantization.native import method_of, quantization_of
from mtp_export.verify.check import Item, Problem, not_tested, verdict
from mtp_export.verify.diagnosis.causes import lists

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_NAME = "mtp: in Quark's exclude as stored"
_METHOD, _EXCLUDE, _REGEX = "quark", "exclude", "re:"


def run(context: Context) -> Iterator[Item]:
    """The linears of the MTP modules of a checkpoint that Quark wrote."""
    main, mtp = context.main, context.mtp
    if main is None or mtp is None:
        return
    quantization = quantization_of(main.config)
    if method_of(quantization) != _METHOD or undecoded_of(main.config) is None:
        return
    entries = left_out(quantization)
    try:
        family = family_of(main.config)
    except MtpExportError as error:
        yield not_tested(_NAME, str(error))
        return
    modules = [spec.module for spec in family.mtp_tensors.values() if spec.is_linear_weight]
    yield verdict(_NAME, [*_problems(modules, entries, mtp.tensors)], f"{len(modules):,} linears")


def _problems(
    modules: Sequence[str], entries: Sequence[str], tensors: Mapping[str, TensorInfo]
) -> Iterator[Problem]:
    """Yield the linears that are stored unquantized and not listed, as one problem, and those that
    are listed and quantized."""
    plain = [one for one in modules if _is_plain(one, tensors) and not entry_for(one, entries)]
    if plain:
        layers = dict.fromkeys(".".join(module.split(".")[:3]) for module in plain)
        added = ", ".join(f"{_REGEX}{re.escape(layer)}\\." for layer in layers)
        idle = [f"{one} in {_EXCLUDE}" for one in entries if _is_glob_of(one, plain)]
        words = lists.not_left_out(QUANTIZATION, len(plain), plain[0], "the MTP module", idle)
        yield Problem(CONFIG_NAME, f"{words}: add {added} to {_EXCLUDE}")
    listed = [
        one for one in modules if _is_plain(one, tensors) is False and entry_for(one, entries)
    ]
    if listed:
        entry = f"{entry_for(listed[0], entries)} in {_EXCLUDE}"
        yield Problem(
            CONFIG_NAME,
            lists.left_out_though_quantized(
                QUANTIZATION, len(listed), listed[0], entry, "the MTP module"
            ),
        )


def _is_plain(module: str, tensors: Mapping[str, TensorInfo]) -> bool | None:
    """True for a linear that is stored unquantized, None for one that is not there."""
    weight = tensors.get(f"{module}.weight")
    if weight is None:
        return None
    scales = (f"{module}.{last}" for last in SCALES_OF_CODES["weight"])
    return weight.dtype in FLOATS and not any(name in tensors for name in scales)


def _is_glob_of(entry: str, modules: Sequence[str]) -> bool:
    """Return whether an entry is a pattern as Quark itself reads them, which engines do not."""
    return (
        "*" in entry
        and not entry.startswith(_REGEX)
        and any(fnmatchcase(module, entry) for module in modules)
    )
