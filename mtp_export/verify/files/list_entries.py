"""Entries of the lists in a quantization_config, each as the one that leaves a module out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.formats import WeightFormat
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.quantization.method import QuantConfig
from mtp_checkpoints.quantization.methods import quant_config_of

_GROUPS, _METHOD, _NESTED = "config_groups", "quant_method", "quantization"
_MOST_ASKED = 30  # linears that tell which objects are lists
_PUNCTUATION = re.compile(r"[^\w.]|^\.|\.$")  # what a pattern has besides names


def lists_in(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of a quantization_config that its lists are in: in a file of ModelOpt's
    that is one of its fields."""
    inner = quantization.get(_NESTED)
    return inner if isinstance(inner, dict) else quantization


def with_list(quantization: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a quantization_config with another value of a list; None: without it."""
    lists = lists_in(quantization)
    changed = {**lists, key: value}
    if value is None:
        del changed[key]
    return changed if lists is quantization else {**quantization, _NESTED: changed}


def without(quantization: Mapping[str, Any], key: str, entry: object) -> dict[str, Any]:
    """Return a quantization_config without an entry of a list or object, or without a single
    value."""
    value = lists_in(quantization)[key]
    rest: Any = None
    if isinstance(value, list):
        rest = [one for one in value if one != entry]
    elif isinstance(value, dict):
        rest = {name: one for name, one in value.items() if name != entry}
    return with_list(quantization, key, rest)


def read(quantization: Mapping[str, Any]) -> QuantConfig | None:
    """Return a quantization_config as its method reads it; None for one that it refuses."""
    try:
        return quant_config_of(quantization)
    except MtpExportError:
        return None


def format_by(config: QuantConfig | None, module: str, role: Role) -> WeightFormat | None:
    """Return the format of a linear; None where it is not quantized, or none is told."""
    try:
        return None if config is None else config.format_of(module, role)
    except MtpExportError:
        return None


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of a list or object in a quantization_config, or the only value of a key. alone:
    the config with no other entry in any list; written: as the file has the list; rename: what an
    engine makes of its entries."""

    quantization: Mapping[str, Any]
    alone: Mapping[str, Any] | None
    key: str
    entry: Any
    written: Any
    rename: Callable[[str], str] = str

    @cached_property
    def own(self) -> Any:
        """The entry as it is written: an engine may read it as a longer pattern."""
        if not isinstance(self.written, list | dict) or self.entry in self.written:
            return self.entry
        renamed = (one for one in self.written if self.rename(str(one)) == self.entry)
        if (same := next(renamed, None)) is not None:
            return same
        words = _PUNCTUATION.sub("", str(self.entry))
        inside = [one for one in self.written if _PUNCTUATION.sub("", str(one)) in words]
        return max(inside, key=lambda one: len(str(one)), default=self.entry)

    @property
    def text(self) -> str:
        return f"{self.key} false" if self.entry is False else f"{self.own} in {self.key}"

    def may_leave_out(self, module: str, role: Role) -> bool:
        """False for an entry of a list that does not leave a module out by itself."""
        if self.alone is None:
            return True
        config = self._of_it_alone
        return config is not None and format_by(config, module, role) is None

    def is_to_blame_for(self, module: str, role: Role) -> bool:
        """True for an entry without which a module would be quantized."""
        return format_by(self._without, module, role) is not None

    @cached_property
    def _of_it_alone(self) -> QuantConfig | None:
        return None if self.alone is None else read(self.alone)

    @cached_property
    def _without(self) -> QuantConfig | None:
        return read(without(self.quantization, self.key, self.entry))


@dataclass(frozen=True)
class ListEntries:
    """The entries of a quantization_config; written is it as the file has it, where the one that is
    read is another, with its entries renamed. linears: some that they may leave out."""

    quantization: Any
    written: Any
    linears: tuple[tuple[str, Role], ...]
    rename: Callable[[str], str] = str
    _without: dict[tuple[Entry, ...], QuantConfig | None] = field(default_factory=dict)

    @cached_property
    def entries(self) -> list[Entry]:
        """All entries: of what else a config has, as its numbers, none."""
        if not isinstance(self.quantization, dict):
            return []
        lists, bare, found = lists_in(self.quantization), self.quantization, list[str]()
        count = self._quantized(bare)
        for key, value in sorted(lists.items(), key=lambda one: isinstance(one[1], dict)):
            if isinstance(value, list | dict) and key != _GROUPS:
                less = with_list(bare, key, type(value)())
                if (more := self._quantized(less)) >= count:
                    bare, count, found = less, more, [*found, key]
        written = lists_in(self.written) if isinstance(self.written, dict) else {}
        entries = [
            Entry(
                *(self.quantization, self._alone(bare, key, one), key, one),
                written=written.get(key),
                rename=self.rename,
            )
            for key in found
            for one in lists[key]
        ]
        return entries + [
            Entry(self.quantization, None, key, value, None)
            for key, value in lists.items()
            if isinstance(value, str | bool) and key != _METHOD
        ]

    def _quantized(self, quantization: Mapping[str, Any]) -> int:
        """Number of the linears that a config quantizes; -1 for one that is not read."""
        config = read(quantization)
        if config is None:
            return -1
        asked = self.linears[:_MOST_ASKED]
        return sum(format_by(config, *linear) is not None for linear in asked)

    def _alone(self, bare: Mapping[str, Any], key: str, entry: Any) -> Mapping[str, Any]:
        value = lists_in(self.quantization)[key]
        return with_list(bare, key, {entry: value[entry]} if isinstance(value, dict) else [entry])

    def to_blame(self, module: str, role: Role) -> tuple[Entry, ...]:
        """Return the entry without which a module would be quantized, or the several of which each
        leaves it out; none where that is no entry's doing.

        A list may have hundreds of entries: those that leave the module out by themselves are tried
        alone, and each config is read once for all modules.
        """
        alone = [one for one in self.entries if one.may_leave_out(module, role)]
        for entry in alone:
            if entry.is_to_blame_for(module, role):
                return (entry,)
        several = tuple(one for one in alone if one.alone is not None)
        for more in ((), *((one,) for one in alone if one.alone is None)):
            if format_by(self._less((*several, *more)), module, role) is not None:
                return (*several, *more)
        return ()

    def _less(self, entries: tuple[Entry, ...]) -> QuantConfig | None:
        """The config without some entries."""
        if entries not in self._without:
            less: Any = self.quantization
            for one in entries:
                if one.key in lists_in(less):
                    less = without(less, one.key, one.entry)
            self._without[entries] = read(less) if isinstance(less, dict) else None
        return self._without[entries]


def entries_to_blame(quantization: Any, module: str) -> dict[str, list[Any]]:
    """Return the entries that leave a linear out, by their lists."""
    role = Role.ROUTED_EXPERT if EXPERTS in f"{module}." else Role.ATTENTION
    found = dict[str, list[Any]]()
    for one in ListEntries(quantization, quantization, ((module, role),)).to_blame(module, role):
        found.setdefault(one.key, []).append(one.entry)
    return found
