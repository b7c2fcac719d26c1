"""Quark: one format for every linear layer but for those of `exclude`, whole names or patterns
after re:, and those that a folder holds without scales: Quark itself takes names with * too.
Patterns of `layer_quant_config` change single ones.

Sources: Quark `torch/export`; vLLM and SGLang `quantization/quark`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import QuarkFp8, QuarkInt4, QuarkInt8, QuarkMxFp4, WeightFormat
from mtp_checkpoints.formats.base import COMPRESSED_SCALE, GROUP_SIZES
from mtp_checkpoints.formats.mx import MX_GROUP
from mtp_checkpoints.quantization.entry_patterns import entry_pattern
from mtp_checkpoints.quantization.method import Method, Unfused, names_in
from mtp_checkpoints.quantization.native import Config, unusable_field
from mtp_checkpoints.quantization.undecoded import UNDECODED

EXCLUDE, _USUAL, NAMED, _TYPED = (
    *("exclude", "global_quant_config"),
    *("layer_quant_config", "layer_type_quant_config"),
)
_REGEX, _EXPERTS = "re:", ".experts"
_ROLES = (*LINEAR_ROLES, Role.MTP_PROJECTION, Role.HEAD)  # engines build gates unquantized
_PACKED = "reorder"  # the order of codes in words
_CHANNEL, _TENSOR, _GROUP = "per_channel", "per_tensor", "per_group"
_OF_ROWS = {_CHANNEL: True, _TENSOR: False}


@dataclass(frozen=True)
class _Quark(Unfused):
    """The format of a module that no entry leaves out: that of the first pattern of its name, else
    the usual one."""

    usual: WeightFormat | None
    named: Mapping[str, WeightFormat | None]
    left_out: tuple[str, ...]

    loads_together: ClassVar[bool] = False

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in _ROLES or entry_for(module, self.left_out):
            return None
        own = (form for pattern, form in self.named.items() if fnmatchcase(module, pattern))
        return next(own, self.usual)


def entry_for(module: str, entries: Sequence[str]) -> str:
    """Return the entry that leaves a linear out, "" for none: engines ask for all experts of a
    layer by one name, and match patterns from the start."""
    layer, is_expert, _ = module.partition(f"{_EXPERTS}.")
    asked = f"{layer}{_EXPERTS}" if is_expert else module
    for entry in entries:
        if entry.startswith(_REGEX):
            found = entry_pattern(entry.removeprefix(_REGEX)).matches(asked)
        else:
            found = entry == asked or (bool(is_expert) and entry.startswith(f"{asked}."))
        if found:
            return entry
    return ""


def _read(quantization: Mapping[str, Any]) -> _Quark:
    """Read a quantization_config (UnsupportedError for other numbers)."""
    listed = left_out(quantization)
    if _USUAL not in quantization:
        raise _refused(f"no {_USUAL}")
    if quantization.get(_TYPED):
        raise _refused(f"{_TYPED} {[*quantization[_TYPED]]}")
    exported = quantization.get("export")
    reorders = not isinstance(exported, dict) or exported.get("pack_method", _PACKED) == _PACKED
    named = quantization.get(NAMED) or {}
    if not isinstance(named, dict):
        raise unusable_field(NAMED, "an object of configs by pattern", named)
    return _Quark(
        _format(quantization.get(_USUAL), reorders=reorders),
        {pattern: _format(own, reorders=reorders) for pattern, own in named.items()},
        listed,
    )


def left_out(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries of a config's list (InvalidInputError for unusable ones)."""
    listed = names_in(quantization, EXCLUDE)
    for entry in listed:
        try:
            entry_pattern(entry.removeprefix(_REGEX) if entry.startswith(_REGEX) else "")
        except re.error as error:
            raise unusable_field(EXCLUDE, "regular expressions after re:", entry) from error
    return tuple(listed)


def _format(own: object, *, reorders: bool) -> WeightFormat | None:
    """Return the format of a config of linear layers; None for one of unquantized weights
    (UnsupportedError for other numbers)."""
    if own is None:
        return None
    if not isinstance(own, dict):
        raise unusable_field(_USUAL, "an object", own)
    weight, inputs = own.get("weight"), own.get("input_tensors")
    if own.get("bias") or own.get("output_tensors"):
        raise _refused("numbers of biases or outputs")
    if weight is None:
        return None
    if not isinstance(weight, dict) or weight.get("is_dynamic"):
        raise _refused("weights in several steps, or quantized at run time")
    numbers, scheme, size = (weight.get(key) for key in ("dtype", "qscheme", "group_size"))
    has_input_scale = isinstance(inputs, dict) and not inputs.get("is_dynamic")
    form: WeightFormat | None = None
    if scheme == _GROUP and numbers in ("int4", "uint4") and size in GROUP_SIZES and reorders:
        form = QuarkInt4(size, signed=numbers == "int4")
    elif scheme == _GROUP and numbers == "fp4" and size == MX_GROUP:
        form = QuarkMxFp4() if weight.get("scale_format") == "e8m0" else None
    elif scheme in _OF_ROWS and numbers == "fp8_e4m3":
        form = QuarkFp8(per_channel=_OF_ROWS[scheme], has_input_scale=has_input_scale)
    elif scheme in _OF_ROWS and numbers == "int8":
        form = QuarkInt8(per_channel=_OF_ROWS[scheme], has_input_scale=has_input_scale)
    if form is None or (has_input_scale and scheme == _GROUP):
        static = ", with scales of inputs" if has_input_scale else ""
        raise _refused(f"{numbers} {scheme}, groups of {size}{static}")
    return form


def _refused(found: str) -> UnsupportedError:
    return UNDECODED["quark"].refusal(found)


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them.

    Engines match patterns from the start.
    """
    patterns = (rf"re:{re.escape(module)}(\.|$)" for module in modules)
    return {
        **quantization,
        EXCLUDE: [*dict.fromkeys([*names_in(quantization, EXCLUDE), *patterns])],
    }


QUARK = Method(_read, leave_out=_leave_out, coded_by=(COMPRESSED_SCALE,))
