"""AutoRound: 4 or 8 bits for the linears of named blocks; `extra_config` changes or leaves out
modules.

Sources: AutoRound's `inference/convert_model.py` and `inference/backend.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import AutoRoundInt4, AutoRoundInt8, AwqInt4, WeightFormat
from mtp_checkpoints.quantization.entry_patterns import EntryPattern, entry_pattern
from mtp_checkpoints.quantization.method import (
    Method,
    Unfused,
    ZeroLabels,
    group_size,
    number_of,
)
from mtp_checkpoints.quantization.native import Config, unusable_field

_CHANGES, _BLOCKS, _OLDER_BLOCKS = "extra_config", "block_name_to_quantize", "to_quant_block_names"
_LEFT_OUT = {"bits": 16, "data_type": "float"}
_SMALLEST_UNQUANTIZED = 16  # bits
# The MTP projection is a linear to AutoRound, and the head where extra_config gives it bits.
_ROLES = (*LINEAR_ROLES, Role.MTP_PROJECTION, Role.HEAD)
_ZEROS = ZeroLabels(
    "packing_format", less_one="auto_round:auto_gptq", as_they_are="auto_round:gptqmodel"
)
_PACKINGS = {_ZEROS.less_one: True, _ZEROS.as_they_are: False, "auto_round": False}
_AWQ = "auto_round:auto_awq"  # of 4 bits alone
_FORMATS = {4: AutoRoundInt4, 8: AutoRoundInt8}
# A key of extra_config without one of these is a module's name, as vLLM and AutoRound read it.
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")


@dataclass(frozen=True)
class _AutoRound(Unfused):
    """The format of a module that is named, else of the first pattern found in its name, else the
    usual one in the blocks; None for one that is left out."""

    usual: WeightFormat
    blocks: tuple[str, ...]
    named: Mapping[str, WeightFormat | None]
    patterns: tuple[tuple[EntryPattern, WeightFormat | None], ...]

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in _ROLES:
            return None
        if module in self.named:
            return self.named[module]
        in_blocks = module.startswith(self.blocks) if self.blocks else role is not Role.HEAD
        if not in_blocks:
            return None
        return next((form for known, form in self.patterns if known.is_in(module)), self.usual)


def _read(quantization: Mapping[str, Any]) -> _AutoRound:
    """Read a quantization_config (UnsupportedError for another layout)."""
    changes = _changes(quantization)
    formats = {name: _changed(quantization, change) for name, change in changes.items()}
    patterns = tuple(
        (_pattern(name), form) for name, form in formats.items() if _SPECIAL.search(name)
    )
    return _AutoRound(_format(quantization), _blocks(quantization), formats, patterns)


def _changed(quantization: Mapping[str, Any], change: Mapping[str, Any]) -> WeightFormat | None:
    bits = change.get("bits")
    if type(bits) is int and bits >= _SMALLEST_UNQUANTIZED:
        return None
    return _format({**quantization, **change})


def _format(quantization: Mapping[str, Any]) -> WeightFormat:
    bits, packing = number_of(quantization, "bits"), quantization.get(_ZEROS.field)
    numbers = quantization.get("data_type", "int")
    packings = (*_PACKINGS, _AWQ) if bits == 4 else _PACKINGS
    if bits not in _FORMATS or numbers != "int" or packing not in packings:
        raise UnsupportedError(
            "config.json describes AutoRound weights that this tool does not read",
            expected=f"4 or 8 bits of data_type int, packing_format {', '.join(_PACKINGS)}, or"
            f" {_AWQ} of 4 bits",
            found=f"{bits} bits of data_type {numbers}, packing_format {packing}",
        )
    size = group_size(quantization, "group_size")
    return AwqInt4(size) if packing == _AWQ else _FORMATS[bits](size, _PACKINGS[str(packing)])


def _changes(quantization: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    changes = quantization.get(_CHANGES) or {}
    if not isinstance(changes, dict) or not all(isinstance(c, dict) for c in changes.values()):
        raise unusable_field(_CHANGES, "an object from modules or patterns to changes", changes)
    return changes


def _pattern(name: str) -> EntryPattern:
    try:
        return entry_pattern(name)
    except re.error as error:
        expected = "names of modules, or regular expressions"
        raise unusable_field(_CHANGES, expected, f"{name}: {error}") from error


def _blocks(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the starts of the names that are quantized; none: all layers are."""
    blocks = quantization.get(_BLOCKS) or quantization.get(_OLDER_BLOCKS) or []
    if isinstance(blocks, str):
        blocks = blocks.split(",")
    if not isinstance(blocks, list) or not all(isinstance(block, str) for block in blocks):
        raise unusable_field(_BLOCKS, "names of blocks, in a list or with commas", blocks)
    return tuple(block.strip() for block in blocks)


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them, before all others."""
    patterns: Config = {rf"^{re.escape(module)}(\..*)?$": _LEFT_OUT for module in modules}
    return {**quantization, _CHANGES: {**patterns, **_changes(quantization)}}


AUTO_ROUND = Method(_read, leave_out=_leave_out, zero_labels=_ZEROS, experts_as_one=True)
