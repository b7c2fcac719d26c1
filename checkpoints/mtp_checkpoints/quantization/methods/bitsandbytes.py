"""bitsandbytes: int8, nf4 or fp4 for every linear layer, but for `llm_int8_skip_modules`, with all
below them, and for those that a folder holds without scales: experts are no linear layers to
transformers 5.

Sources: transformers' `replace_with_bnb_linear`,
`should_convert_module` and `BitsAndBytesConfig`, SGLang
`quantization/bitsandbytes.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from mtp_checkpoints.families.base import LINEAR_ROLES, Role
from mtp_checkpoints.formats import BitsAndBytes4, BitsAndBytesInt8, WeightFormat
from mtp_checkpoints.quantization.entry_patterns import EntryPattern, entry_pattern
from mtp_checkpoints.quantization.method import Method, Unfused, names_in
from mtp_checkpoints.quantization.native import Config, unusable_field
from mtp_checkpoints.quantization.undecoded import UNDECODED

SKIPPED = "llm_int8_skip_modules"
_HEAD = "lm_head"  # which transformers leaves out where nothing is listed, and then alone
_ROLES = (
    *(*LINEAR_ROLES, Role.ROUTER, Role.MTP_PROJECTION, Role.HEAD),
    *(Role.DELTA_GATES, Role.ATTENTION_GATES, Role.INDEXER_HEADS),
)
_NUMBERS = ("nf4", "fp4")
_CODES_IN = "uint8"
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # of a module's name


@dataclass(frozen=True)
class _BitsAndBytes(Unfused):
    """The format of a module of which no entry is the end, or a pattern of the start."""

    form: WeightFormat
    left_out: tuple[str, ...]

    loads_together: ClassVar[bool] = False

    @cached_property
    def _starts(self) -> list[EntryPattern]:
        """The entries as patterns."""
        return [entry_pattern(rf"(?:{entry}){_BOUNDARY}") for entry in self.left_out]

    def format_of(self, module: str, role: Role) -> WeightFormat | None:
        return None if role not in _ROLES or self._covers(module) else self.form

    def _covers(self, module: str) -> bool:
        """Return whether an entry of the list leaves a module out."""
        is_end = module.endswith(self.left_out)
        return is_end or any(start.matches(module) for start in self._starts)


def _read(quantization: Mapping[str, Any]) -> _BitsAndBytes:
    """Read a quantization_config (UnsupportedError for other numbers)."""
    numbers = quantization.get("bnb_4bit_quant_type", "fp4")
    codes_in = quantization.get("bnb_4bit_quant_storage") or _CODES_IN
    listed = [_HEAD] if quantization.get(SKIPPED) is None else names_in(quantization, SKIPPED)
    for entry in listed:
        try:
            entry_pattern(entry)
        except re.error as error:
            raise unusable_field(SKIPPED, f"patterns ({error})", entry) from error
    form: WeightFormat
    if quantization.get("load_in_8bit"):
        form = BitsAndBytesInt8()
    elif quantization.get("load_in_4bit") and numbers in _NUMBERS and codes_in == _CODES_IN:
        nested = quantization.get("bnb_4bit_use_double_quant")
        form = BitsAndBytes4(str(numbers), nested=bool(nested))
    else:
        raise UNDECODED["bitsandbytes"].refusal(f"{numbers} in {codes_in}")
    return _BitsAndBytes(form, tuple(listed))


def _leave_out(quantization: Config, modules: Sequence[str]) -> Config:
    """Return a config that leaves modules unquantized, with all below them."""
    listed = [_HEAD] if quantization.get(SKIPPED) is None else names_in(quantization, SKIPPED)
    return {**quantization, SKIPPED: [*dict.fromkeys([*listed, *modules])]}


BITSANDBYTES = Method(_read, leave_out=_leave_out, coded_by=("SCB", "weight.absmax"))
