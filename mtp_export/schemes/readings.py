"""quantization_config as the engines read it: which form a linear of a given name is stored in.

Only names and config decide, never which tensors exist: what contradicts them can then be found.
Sources: vLLM and SGLang `quantization/{fp8,compressed_tensors,w4afp8}`, compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtp_export.errors import InvalidInputError, UnsupportedError
from mtp_export.families.base import LINEAR_ROLES, BlockFp8, Role, block_fp8, left_out_of_fp8
from mtp_export.schemes.storage import (
    BLOCK,
    COMPRESSED_SCALE,
    GROUP_SIZES,
    NATIVE_SCALE,
    Storage,
)

# Linears by class, to loaders that go by class: none of them is quantized in any release.
_LINEAR_BY_CLASS = (*LINEAR_ROLES, Role.HEAD, Role.MTP_PROJECTION)
_SCALE_DTYPES = ("F32", "F8_E8M0")  # engines widen a power of two as they load it
_REGEX = "re:"
_CLASS = "Linear"


@dataclass(frozen=True)
class Form:
    """How a quantized linear is stored. group_size belongs to int4, the fp8 fields to fp8 blocks:
    the last component of a scale's name, and its dtypes."""

    storage: Storage
    group_size: int = BLOCK
    fp8_scale_name: str = NATIVE_SCALE
    fp8_scale_dtypes: tuple[str, ...] = ("F32",)


class Reading(Protocol):
    """A quantization_config, understood."""

    def form_of(self, module: str, role: Role) -> Form | None:
        """The form of a linear by its module name; None for one that is not quantized."""

    def fused_form(self, fused: str, form: Form) -> Form | None:
        """What becomes of quantized linears of one form when an engine fuses them under a name;
        routed experts are looked up one by one."""


def reading_of(quantization: object) -> Reading:
    """Read a quantization_config; none, {} and "" (as xLLM has it) stand for no quantization.

    Raises UnsupportedError for a method or layout that this tool does not know, InvalidInputError
    for one that makes no sense.
    """
    if not quantization:
        return _Unquantized()
    if not isinstance(quantization, dict):
        raise InvalidInputError(
            "config.json has no usable quantization_config",
            expected="an object, or none",
            found=repr(quantization)[:100],
        )
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise UnsupportedError(
            "config.json names a quantization method that this tool does not read",
            expected=f"quant_method {' or '.join(READERS)}",
            found=repr(method)[:100],
        )
    return READERS[method](quantization)


@dataclass(frozen=True)
class _Unquantized:
    def form_of(self, module: str, role: Role) -> Form | None:
        return None

    def fused_form(self, fused: str, form: Form) -> Form | None:
        return form


@dataclass(frozen=True)
class _Fp8:
    """Native fp8 blocks for every linear that is not left out, and one form for the experts."""

    fp8: BlockFp8
    experts: Form | None = None

    def form_of(self, module: str, role: Role) -> Form | None:
        if role not in LINEAR_ROLES or not self.fp8.covers(module):
            return None
        if role is Role.ROUTED_EXPERT and self.experts is not None:
            return self.experts
        return Form(Storage.FP8_BLOCK, fp8_scale_dtypes=self.fp8.scale_dtypes)

    def fused_form(self, fused: str, form: Form) -> Form | None:
        return form


def _read_fp8(quantization: Mapping[str, Any]) -> Reading:
    fp8 = block_fp8({"quantization_config": quantization})
    assert fp8 is not None, "reading_of handles its absence"
    return _Fp8(fp8)


def _read_w4afp8(quantization: Mapping[str, Any]) -> Reading:
    """SGLang's own: int4 experts, every other linear in native fp8."""
    fp8 = BlockFp8((BLOCK, BLOCK), _SCALE_DTYPES, left_out_of_fp8(quantization))
    return _Fp8(fp8, Form(Storage.W4AFP8))


@dataclass(frozen=True)
class _Compressed:
    """compressed-tensors: a module is ignored, else the first target that matches its name says its
    form, else its class does. With linear_fp8 (SGLang) only experts are looked up like that."""

    ignore: tuple[str, ...]
    targets: tuple[tuple[str, Form], ...]
    linear_fp8: Form | None

    def form_of(self, module: str, role: Role) -> Form | None:
        if role not in _LINEAR_BY_CLASS:
            return None
        if self.linear_fp8 is not None and role is not Role.ROUTED_EXPERT:
            return self.linear_fp8 if role in LINEAR_ROLES else None
        if _matches_any(module, self.ignore):
            return None
        return self._by_name(module) or self._by_class()

    def fused_form(self, fused: str, form: Form) -> Form | None:
        if self.linear_fp8 is not None:
            return form
        if _matches_any(fused, self.ignore):
            return None
        return self._by_name(fused) or self._by_class() or form

    def _by_name(self, module: str) -> Form | None:
        return next((form for target, form in self.targets if _matches(module, target)), None)

    def _by_class(self) -> Form | None:
        return next((form for target, form in self.targets if target == _CLASS), None)


def _matches(module: str, pattern: str) -> bool:
    """A name, or a regular expression that a name must begin with."""
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
        raise _unusable("config_groups", "an object with one group or more", groups)
    targets: list[tuple[str, Form]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise _unusable(f"config_groups.{name}", "an object", group)
        form = _group_form(name, group, quantization.get("format"))
        targets += [(target, form) for target in _patterns(f"config_groups.{name}.targets", group)]
    linear_fp8 = None
    if quantization.get("linear_fp8_config") is not None:
        block_fp8({"quantization_config": quantization["linear_fp8_config"]})
        linear_fp8 = Form(Storage.FP8_BLOCK, fp8_scale_dtypes=_SCALE_DTYPES)
    return _Compressed(tuple(_patterns("ignore", quantization)), tuple(targets), linear_fp8)


def _patterns(key: str, holder: Mapping[str, Any]) -> Sequence[str]:
    """A list of names and patterns, all of them sound."""
    listed = holder.get(key.rpartition(".")[2]) or []
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        raise _unusable(key, "a list of module names and re: patterns", listed)
    for entry in listed:
        try:
            re.compile(entry.removeprefix(_REGEX) if entry.startswith(_REGEX) else "")
        except re.error as error:
            raise _unusable(key, "regular expressions after re:", f"{entry}: {error}") from error
    return listed


def _group_form(name: str, group: Mapping[str, Any], format_of_all: object) -> Form:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise _unusable(f"config_groups.{name}.weights", "an object", weights)
    size = weights.get("group_size")
    kind = (
        group.get("format") or format_of_all,
        weights.get("type"),
        weights.get("num_bits"),
        weights.get("strategy"),
    )
    plain = weights.get("symmetric") is True and not weights.get("dynamic")
    if plain and not weights.get("actorder"):
        if kind == ("pack-quantized", "int", 4, "group") and size in GROUP_SIZES:
            return Form(Storage.INT4_GROUP, size)
        if kind == ("pack-quantized", "int", 8, "channel"):
            return Form(Storage.INT8_CHANNEL)
        is_block = weights.get("block_structure") == [BLOCK, BLOCK]
        if kind == ("float-quantized", "float", 8, "block") and is_block:
            return Form(Storage.FP8_BLOCK, BLOCK, COMPRESSED_SCALE, _SCALE_DTYPES)
    raise UnsupportedError(
        f"config_groups.{name} of config.json describes weights that this tool does not read",
        expected="pack-quantized int4 in groups of 32, 64 or 128, pack-quantized int8 per channel, "
        "or float-quantized blocks of 128x128; symmetric, without actorder",
        found=f"format {kind[0]}, {kind[1]}{kind[2]}, strategy {kind[3]}, group_size {size}",
    )


def _unusable(key: str, expected: str, found: object) -> InvalidInputError:
    return InvalidInputError(
        f"config.json has no usable quantization_config.{key}",
        expected=expected,
        found=repr(found)[:100],
    )


READERS: dict[str, Callable[[Mapping[str, Any]], Reading]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "w4afp8": _read_w4afp8,
}
