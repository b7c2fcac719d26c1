"""The list of a quantization_config that leaves modules unquantized, compared with how the MTP
modules are stored: which modules it lacks, or which entry is one too many."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from mtp_checkpoints.containers.base import CONFIG_NAME, TensorInfo
from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.base import FLOATS, Role
from mtp_checkpoints.formats import UNQUANTIZED
from mtp_checkpoints.formats.base import SCALES_OF_CODES
from mtp_checkpoints.quantization.method import QuantConfig, modules_of
from mtp_checkpoints.quantization.methods import METHODS, quant_config_of
from mtp_checkpoints.quantization.native import field_of, method_of
from mtp_checkpoints.quantization.stored import StoredModel, StoredWeight
from mtp_export.verify.check import Problem
from mtp_export.verify.diagnosis.causes import lists
from mtp_export.verify.files.list_entries import ListEntries, format_by, lists_in, read, without

_GROUPS = "config_groups"
_SHOWN = 300  # characters of an entry
_ASKED = 200_000  # entries times modules
_LOOKED_INTO = 20  # entries of a list that are for the module and may act on nothing
_MTP_WORD = re.compile("mtp|nextn")


@dataclass(frozen=True)
class ListedDraft:
    """A draft as a quantization_config describes it to a reader, beside how it is stored: both by
    the names that the reader has. layers are those of the MTP layers; part is its name in words;
    written is the quantization_config as the file has it, where the reader's is another, with its
    entries renamed; plain are the modules that the reader builds unquantized whatever it says, by
    their released names, and engines says who that is."""

    described: StoredModel
    tensors: Mapping[str, TensorInfo]
    quantization: Any
    layers: tuple[str, ...]
    part: str = "the MTP module"
    written: Any = None
    rename: Callable[[str], str] = str
    plain: Collection[str] = ()
    engines: str = ""

    def problems(self) -> list[Problem]:
        """Modules that the list lacks, in one problem, and those that it has too many, by entry."""
        return [*self._lacking(), *self._too_many(self._wrongly_plain)]

    def unread(self) -> list[Problem]:
        """Those that are quantized where the reader builds them plain, whatever a list says."""
        words = lists.quantized_where_plain
        return [
            Problem(weight.tensors[0].name, words(weight.weight.module, self.engines))
            for weight in self._matrices
            if self._is_unread(weight) and self._is_plain(weight) is False
        ]

    def by_lists(self, names: Collection[str]) -> list[Problem]:
        """The same of weights by name, where lists explain all of them; none where they do not, or
        where they are too many to ask each entry for."""
        plain = [one for one in self._wrongly_plain if one.weight.name in names]
        own = {one.weight.name for one in (*plain, *self._unquantized)}
        few = len(plain) * len(self._listed.entries) <= _ASKED
        if not few or not own.issuperset(names):
            return []
        return [*self._lacking(), *self._too_many(plain)]

    @property
    def quantized(self) -> list[str]:
        """The modules that an engine would build unquantized and that are not."""
        return [_module_of(one) for one in self._wrongly_plain]

    @cached_property
    def _wrongly_plain(self) -> list[StoredWeight]:
        """The matrices that an engine would build unquantized and that are not."""
        return [
            weight
            for weight in self._matrices
            if weight.format is UNQUANTIZED
            and not self._is_unread(weight)
            and self._is_plain(weight) is False
        ]

    def _is_unread(self, weight: StoredWeight) -> bool:
        """True for a matrix whose codes the reader does not load in this method."""
        method = METHODS.get(method_of(self.quantization))
        packs = method is not None and method.packs_projections
        return weight.weight.module in self.plain and not packs

    def _is_plain(self, weight: StoredWeight) -> bool | None:
        """True for a matrix that is stored unquantized, None for one that is there in no form, or
        in one that is none: floats beside a scale, codes without one."""
        module = _module_of(weight)
        tensor = self.tensors.get(f"{module}.weight")
        if tensor is not None:
            is_plain = tensor.dtype in FLOATS
            scales = (f"{module}.{last}" for last in SCALES_OF_CODES["weight"])
            is_scaled = any(one in self.tensors for one in scales)
            return None if is_plain == is_scaled else is_plain
        codes = (f"{module}.{last}" for last in SCALES_OF_CODES)
        return False if any(name in self.tensors for name in codes) else None

    @property
    def to_add(self) -> dict[str, Any]:
        """The entries that are to be added, by their lists and objects; none where nothing lacks,
        or no list can leave it out."""
        if not self._unquantized:
            return {}
        modules = self._to_leave_out(self._unquantized)
        return lacking(self.quantization, self._as_written, modules, [*self._projections])

    @property
    def to_take(self) -> dict[str, list[Any]]:
        """The entries that leave out what is stored quantized, by their lists and objects."""
        found = dict[str, list[Any]]()
        linears = [(_module_of(one), one.weight.role) for one in self._wrongly_plain]
        for entry in {one: None for linear in linears for one in self._listed.to_blame(*linear)}:
            if entry.own not in found.setdefault(entry.key, []):
                found[entry.key].append(entry.own)
        return found

    @property
    def _as_written(self) -> Any:
        return self.written or self.quantization

    @property
    def _matrices(self) -> Iterator[StoredWeight]:
        return (one for one in self.described.weights.values() if len(one.weight.shape) == 2)

    @cached_property
    def _unquantized(self) -> list[StoredWeight]:
        """The matrices that an engine would build quantized and that are not, but for projections,
        routers and what it builds plain."""
        return [
            weight
            for weight in self._matrices
            if weight.weight.role not in (Role.MTP_PROJECTION, Role.ROUTER)
            and weight.weight.module not in self.plain
            and weight.format is not UNQUANTIZED
            and self._is_plain(weight)
        ]

    @cached_property
    def _with_them(self) -> Mapping[str, Any] | None:
        """The config whose lists have what lacks; None where nothing does, or no list can."""
        if not self._unquantized:
            return None
        leave_out = METHODS[method_of(self.quantization)].leave_out
        if leave_out is None:
            return None
        return leave_out(self.quantization, self._to_leave_out(self._unquantized))

    def _lacking(self) -> Iterator[Problem]:
        """The modules that an engine would build quantized and that are not."""
        weights = self._unquantized
        if not weights:
            return
        idle = [] if self._with_them is None else [*self._idle(self._with_them)]
        module, config = _module_of(weights[0]), field_of(self._as_written)
        words = lists.not_left_out(config, len(weights), module, self.part, idle)
        yield Problem(weights[0].tensors[0].name, words)

    def _idle(self, with_them: Mapping[str, Any]) -> Iterator[str]:
        """Entries that by their words are for the MTP module, and leave nothing of it unquantized.
        with_them: the config whose lists have what lacks."""
        built = {_module_of(weight) for weight in self._unquantized}  # quantized, by the config
        modules = {_module_of(weight): weight.weight.role for weight in self._matrices}
        kept = tuple(one for one, role in modules.items() if role is Role.MTP_PROJECTION)
        first = min(one.weight.mtp_layer or 0 for one in self.described.weights.values())
        read_as = [one.own for one in self._listed.entries]  # a reader drops what reaches nothing
        named = METHODS[method_of(self.quantization)].key_of or (lambda _, key: key)
        values, written = lists_in(self.quantization), lists_in(self._as_written)
        after = {named(self._as_written, key): value for key, value in with_them.items()}
        keys = [key for key, value in after.items() if values.get(key) != value]
        for key in keys:
            own = written.get(key)
            is_unread = not values.get(key) and any(values.get(other) for other in keys)
            if is_unread or not isinstance(own, list | dict):
                continue
            meant = (one for one in own if isinstance(one, str) and _is_for_mtp(one, first))
            for entry in islice(meant, _LOOKED_INTO):
                if entry.replace("\\", "").endswith(kept):  # which no engine quantizes
                    continue
                is_read = entry in (values.get(key) or ())
                acts = entry in modules or not is_read or self._acts(key, entry)
                if entry not in read_as or (is_read and (entry in built or not acts)):
                    yield f"{entry[:_SHOWN]} in {key}"

    def _acts(self, key: str, entry: object) -> bool:
        """True for an entry without which a matrix of the module has another format."""
        try:
            own = quant_config_of(self.quantization)
            less = quant_config_of(without(self.quantization, key, entry))
            modules = {_module_of(w): w.weight.role for w in self.described.weights.values()}
            return any(own.format_of(m, r) != less.format_of(m, r) for m, r in modules.items())
        except MtpExportError:
            return True

    def _to_leave_out(self, weights: list[StoredWeight]) -> list[str]:
        """The MTP layers, where all their linears are stored unquantized and the method knows
        modules; else the linears. Projections beside the layers, too, which some engines build as
        any linear."""
        every = (one for one in self.described.weights.values() if one.weight.is_linear_weight)
        whole_names = METHODS[method_of(self.quantization)].whole_names
        if self.layers and not whole_names and all(self._is_plain(one) for one in every):
            return [*self.layers, *self._projections]
        own_names = (w.weight._replace(name=w.tensors[0].name) for w in weights)
        return [*modules_of(own_names), *self._projections]

    @property
    def _projections(self) -> Iterator[str]:
        """Unquantized projections outside the layers that the config does not leave out."""
        config, layers = read(self._as_written), tuple(f"{one}." for one in self.layers)
        for weight in self._matrices:
            module = _module_of(weight)
            if weight.weight.role is not Role.MTP_PROJECTION or module.startswith(layers):
                continue
            quantizes = config is not None and config.format_of(module, Role.ATTENTION) is not None
            if quantizes and self._is_plain(weight):
                yield module

    def _too_many(self, weights: list[StoredWeight]) -> Iterator[Problem]:
        """Quantized modules that an engine would build unquantized, by the entry to blame."""
        by_entry: dict[str, list[StoredWeight]] = {}
        for weight in weights:
            by_entry.setdefault(self._to_blame(weight), []).append(weight)
        for entry, alike in by_entry.items():
            name = alike[0].tensors[0].name
            words = lists.left_out_though_quantized(
                field_of(self._as_written) if self.quantization else "",
                len(alike),
                _module_of(alike[0]),
                entry,
                self.part,
            )
            if self.written and not self.quantization:  # of drafts that are never built by one
                name = alike[0].weight.name
                words = lists.quantized_in_vain(len(alike), _module_of(alike[0]))
            yield Problem(name if self._as_written else CONFIG_NAME, words)

    def _to_blame(self, weight: StoredWeight) -> str:
        """The entries to blame in words, "" where none is."""
        module, role = _module_of(weight), weight.weight.role
        if blamed := self._listed.to_blame(module, role):
            return " and ".join(one.text for one in blamed)
        return lists.NO_TARGET if format_by(self._of_every_linear, module, role) else ""

    @cached_property
    def _of_every_linear(self) -> QuantConfig | None:
        """The config with groups that are for every linear, where its own are for some."""
        groups = self.quantization.get(_GROUPS) if isinstance(self.quantization, dict) else None
        if not isinstance(groups, dict):
            return None
        return read(
            {
                **self.quantization,
                _GROUPS: {name: {**one, "targets": ["Linear"]} for name, one in groups.items()},
            }
        )

    @cached_property
    def _listed(self) -> ListEntries:
        linears = tuple((_module_of(one), one.weight.role) for one in self._wrongly_plain)
        return ListEntries(self.quantization, self._as_written, linears, self.rename)


def lacking(
    quantization: Any,
    written: Any,
    modules: Sequence[str],
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the entries that leave modules out, by their lists and objects, where an engine reads
    a quantization_config that is written otherwise; none where no list can. beside: those of them
    that are named even so where the engine has them left out."""
    if not modules or (method := METHODS[method_of(quantization)]).leave_out is None:
        return {}
    old = {*_entries(quantization)}
    if beside:
        old -= {*_entries(method.leave_out(written, beside))} - {*_entries(written)}
    named = method.key_of or (lambda _, key: key)
    added = dict(_added(old, method.leave_out(quantization, modules)))
    # Of lists that have the same, as native fp8's two, an engine reads one alone: the written one.
    own = [entries for key, entries in added.items() if key in quantization]
    return {
        named(written, key): entries
        for key, entries in added.items()
        if key in quantization or entries not in own
    }


def _is_for_mtp(entry: str, first: int) -> bool:
    """Return whether an entry names MTP modules: by a word, or by a layer from the first of them
    on."""
    numbers = map(int, re.findall(r"layers\\?\.(\d{1,6})", entry))
    return _MTP_WORD.search(entry) is not None or any(number >= first for number in numbers)


def _module_of(weight: StoredWeight) -> str:
    return weight.tensors[0].name.rpartition(".")[0]


def _added(old: Collection[str], after: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the lists and objects in a quantization_config, each with its entries that are none of
    some."""
    for key, value in after.items():
        if not isinstance(value, list | dict):
            continue
        more = [one for one in value if isinstance(one, str) and one not in old]
        if more:
            yield key, {one: value[one] for one in more} if isinstance(value, dict) else more


def _entries(value: object) -> Iterator[str]:
    """Every entry of the lists and objects in a value."""
    if isinstance(value, Mapping):
        yield from map(str, value)
        for inner in value.values():
            yield from _entries(inner)
    elif isinstance(value, list):
        yield from map(str, value)
