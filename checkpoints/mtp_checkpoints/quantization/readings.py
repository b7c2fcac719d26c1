"""quantization_config as engines read it: the format of a linear by its module name.

Names and config alone decide, never which tensors exist, so that contradictions can be found.
Sources: vLLM and SGLang `quantization/{fp8,compressed_tensors,w4afp8}`, compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import COMPRESSED_FORMATS, Fp8Block, W4AFp8, WeightFormat
from mtp_checkpoints.formats.compressed import WeightsEntry
from mtp_checkpoints.formats.storage import SCALE_DTYPES
from mtp_checkpoints.quantization.methods.awq import AWQ, read_awq
from mtp_checkpoints.quantization.methods.gptq import GPTQ, read_gptq
from mtp_checkpoints.quantization.methods.modelopt import MODELOPT, read_modelopt
from mtp_checkpoints.quantization.native import (
    COMPRESSED,
    NativeFp8,
    left_out,
    native_fp8,
    not_an_object,
    unusable_field,
)

# Roles of linears to loaders that go by class; no release quantizes the last two.
_LINEAR_BY_CLASS = (*LINEAR_ROLES, Role.HEAD, Role.MTP_PROJECTION)
_REGEX = "re:"
_CLASS = "Linear"


class Reading(Protocol):
    """A quantization_config that was understood."""

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        """Return the format of a linear by its module name; None for an unquantized one."""

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        """Return the format that an engine takes a fused linear for, whose parts have one format.

        Routed experts are looked up one by one, never fused.
        """


def reading_of(quantization: object) -> Reading:
    """Read a quantization_config; None, {} and "" (as xLLM has it) mean no quantization.

    Raises UnsupportedError for a method or layout that this tool does not know, InvalidInputError
    for one that makes no sense.
    """
    if not quantization:
        return _Unquantized()
    if not isinstance(quantization, dict):
        raise not_an_object(quantization)
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in READINGS:
        raise UnsupportedError(
            "config.json names a quantization method that this tool does not read",
            expected=f"quant_method {' or '.join(READINGS)}",
            found=repr(method)[:100],
        )
    return READINGS[method](quantization)


@dataclass(frozen=True)
class _Unquantized:
    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        return None

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        return parts


@dataclass(frozen=True)
class _Fp8:
    """Native fp8 blocks for every linear that is not left out, and one format for the experts."""

    native: NativeFp8
    experts: WeightFormat | None = None

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in LINEAR_ROLES or not self.native.covers(module):
            return None
        if role is Role.ROUTED_EXPERT and self.experts is not None:
            return self.experts
        return Fp8Block(scale_dtypes=self.native.scale_dtypes)

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        return parts


def _read_fp8(quantization: Mapping[str, Any]) -> Reading:
    native = native_fp8(quantization)
    assert native is not None, "reading_of handles its absence"
    return _Fp8(native)


def _read_w4afp8(quantization: Mapping[str, Any]) -> Reading:
    """Read SGLang's own method: int4 experts, every other linear in native fp8."""
    return _Fp8(NativeFp8(SCALE_DTYPES, left_out(quantization)), W4AFp8())


@dataclass(frozen=True)
class _Compressed:
    """compressed-tensors: a module is ignored, or has the format of the first target that matches
    its name, or else that of its class. With linear_fp8 (SGLang) this holds for experts alone."""

    ignore: tuple[str, ...]
    targets: tuple[tuple[str, WeightFormat], ...]
    linear_fp8: WeightFormat | None

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in _LINEAR_BY_CLASS:
            return None
        if self.linear_fp8 is not None and role is not Role.ROUTED_EXPERT:
            return self.linear_fp8 if role in LINEAR_ROLES else None
        if _matches_any(module, self.ignore):
            return None
        return self._by_name(module) or self._by_class()

    def fused_format(self, fused: str, parts: WeightFormat) -> WeightFormat | None:
        if self.linear_fp8 is not None:
            return parts
        if _matches_any(fused, self.ignore):
            return None
        return self._by_name(fused) or self._by_class() or parts

    def _by_name(self, module: str) -> WeightFormat | None:
        return next((form for target, form in self.targets if _matches(module, target)), None)

    def _by_class(self) -> WeightFormat | None:
        return next((form for target, form in self.targets if target == _CLASS), None)


def _matches(module: str, pattern: str) -> bool:
    """Match a whole name, or a regular expression from a name's start."""
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), module) is not None
    return pattern == module


def _matches_any(module: str, patterns: Iterable[str]) -> bool:
    return any(_matches(module, pattern) for pattern in patterns)


def _read_compressed(quantization: Mapping[str, Any]) -> Reading:
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if quantization.get(key):
            raise UnsupportedError(
                f"config.json's quantization_config has a {key}, which this tool does not read",
                expected="none",
                found=repr(quantization[key])[:100],
            )
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise unusable_field("config_groups", "an object with one group or more", groups)
    targets: list[tuple[str, WeightFormat]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise unusable_field(f"config_groups.{name}", "an object", group)
        form = _group_format(name, group, quantization.get("format"))
        targets += [(target, form) for target in _patterns(f"config_groups.{name}.targets", group)]
    linear_fp8 = None
    if quantization.get("linear_fp8_config") is not None:
        native_fp8(quantization["linear_fp8_config"])
        linear_fp8 = Fp8Block(scale_dtypes=SCALE_DTYPES)
    return _Compressed(tuple(_patterns("ignore", quantization)), tuple(targets), linear_fp8)


def _patterns(key: str, holder: Mapping[str, Any]) -> Sequence[str]:
    """Return a list of names and patterns, all of them valid."""
    listed = holder.get(key.rpartition(".")[2]) or []
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise unusable_field(key, "a list of module names and re: patterns", listed)
    for entry in listed:
        try:
            re.compile(entry.removeprefix(_REGEX) if entry.startswith(_REGEX) else "")
        except re.error as error:
            raise unusable_field(
                key, "regular expressions after re:", f"{entry}: {error}"
            ) from error
    return listed


def _group_format(name: str, group: Mapping[str, Any], layout: object) -> WeightFormat:
    """Return the format of a group; layout is the config's own, for all groups."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise unusable_field(f"config_groups.{name}.weights", "an object", weights)
    entry = WeightsEntry.of(group, layout)
    if entry is not None:
        for known in COMPRESSED_FORMATS:
            if (found := known.of_entry(entry)) is not None:
                return found
    *most, last = (one.in_words for one in COMPRESSED_FORMATS)
    raise UnsupportedError(
        f"config_groups.{name} of config.json describes weights that this tool does not read",
        expected=f"{', '.join(most)}, or {last}; symmetric, without actorder",
        found=f"format {group.get('format') or layout}, {weights.get('type')}"
        f"{weights.get('num_bits')}, strategy {weights.get('strategy')},"
        f" group_size {weights.get('group_size')}",
    )


READINGS: dict[str, Callable[[Mapping[str, Any]], Reading]] = {
    "fp8": _read_fp8,
    COMPRESSED: _read_compressed,
    "w4afp8": _read_w4afp8,
    AWQ: read_awq,
    GPTQ: read_gptq,
    MODELOPT: read_modelopt,
}
