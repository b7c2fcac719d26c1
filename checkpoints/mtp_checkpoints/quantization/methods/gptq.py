"""GPTQ: 4 or 8 bits for every linear, or those of which `modules_in_block_to_quantize` has parts of
names; `dynamic` changes or leaves out those whose names a pattern matches.

Sources: vLLM `quantization/auto_gptq.py`, SGLang `quantization/gptq`, GPTQModel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import GptqInt4, GptqInt8, WeightFormat
from mtp_checkpoints.quantization.entry_patterns import entry_pattern
from mtp_checkpoints.quantization.method import (
    Method,
    Unfused,
    ZeroLabels,
    group_size,
    number_of,
)
from mtp_checkpoints.quantization.native import Config, unusable_field

_DYNAMIC, BLOCKS = "dynamic", "modules_in_block_to_quantize"
PERMUTED = "desc_act"
_NEGATIVE, _POSITIVE = "-:", "+:"
# GPTQModel's newer layout holds zero points as they are.
_ZEROS = ZeroLabels("checkpoint_format", less_one="gptq", as_they_are="gptq_v2")
_LAYOUTS = {_ZEROS.less_one: True, _ZEROS.as_they_are: False}
_FORMATS = {4: GptqInt4, 8: GptqInt8}


@dataclass(frozen=True)
class _Gptq(Unfused):
    """The format of the first pattern that matches a name from its start, None for one that leaves
    it out; else the usual format."""

    usual: WeightFormat
    patterns: tuple[tuple[str, WeightFormat | None], ...]

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        if role not in LINEAR_ROLES:
            return None
        for pattern, form in self.patterns:
            if entry_pattern(pattern).matches(module):
                return form
        return self.usual


def _read(quantization: Mapping[str, Any]) -> _Gptq:
    """Read a quantization_config (UnsupportedError for another layout)."""
    patterns: list[tuple[str, WeightFormat | None]] = []
    if blocks := list(_flat(quantization.get(BLOCKS) or [])):
        # The name of all experts of a layer is in no list, and vLLM does not look for it.
        patterns.append((rf"(?!.*(?:{'|'.join(map(re.escape, blocks))}|\.experts$))", None))
    for pattern, own in _dynamic(quantization).items():
        left_out = pattern.startswith(_NEGATIVE)
        form = None if left_out else _format({**quantization, **own})
        patterns.append((pattern.removeprefix(_NEGATIVE).removeprefix(_POSITIVE), form))
    return _Gptq(_format(quantization), tuple(patterns))


def _flat(blocks: object) -> Iterator[str]:
    """Yield the parts of names that are quantized, in lists of any depth."""
    if not isinstance(blocks, list):
        raise unusable_field(BLOCKS, "parts of names, in a list or in lists", blocks)
    for block in blocks:
        yield from [block] if isinstance(block, str) else _flat(block)


def _format(quantization: Mapping[str, Any]) -> WeightFormat:
    bits = number_of(quantization, "bits")
    layout = quantization.get(_ZEROS.field) or _ZEROS.less_one
    if bits not in _FORMATS or layout not in _LAYOUTS or quantization.get("lm_head"):
        raise UnsupportedError(
            "config.json describes GPTQ weights that this tool does not read",
            expected=f"4 or 8 bits, {_ZEROS.field} {' or '.join(_LAYOUTS)}, the head unquantized",
            found=f"{bits} bits, {_ZEROS.field} {layout}, lm_head {quantization.get('lm_head')}",
        )
    return _FORMATS[bits](
        group_size(quantization, "group_size"),
        _LAYOUTS[layout],
        permuted=bool(quantization.get(PERMUTED)),
    )


def _dynamic(quantization: Mapping[str, Any]) -> dict[str, Any]:
    found = quantization.get(_DYNAMIC) or {}
    if not isinstance(found, dict):
        raise unusable_field(_DYNAMIC, "an object from patterns to changes", found)
    for pattern, own in found.items():
        try:
            entry_pattern(pattern.removeprefix(_NEGATIVE).removeprefix(_POSITIVE))
        except re.error as error:
            expected = "regular expressions after +: and -:"
            raise unusable_field(_DYNAMIC, expected, f"{pattern}: {error}") from error
        if not isinstance(own, dict):
            raise unusable_field(_DYNAMIC, "an object from patterns to changes", own)
    return found


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them.

    Their patterns come first: engines take the first that matches.
    """
    ours: Config = {rf"{_NEGATIVE}{re.escape(module)}(\..*)?$": {} for module in modules}
    return {**quantization, _DYNAMIC: {**ours, **_dynamic(quantization)}}


GPTQ = Method(
    _read,
    leave_out=_leave_out,
    absent_key=BLOCKS,
    zero_labels=_ZEROS,
    experts_as_one=True,
)
