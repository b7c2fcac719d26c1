"""Facts of a checkpoint from its headers alone: seconds on 163 shards, no weight is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import MtpExportError, UnsupportedError, UsageError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.signs import main_layers, mtp_modules
from mtp_checkpoints.layouts import TARGETS, target_of_format
from mtp_checkpoints.quantization.absent import as_engines_take
from mtp_checkpoints.quantization.mismatches import Mismatch
from mtp_checkpoints.quantization.native import describe, quantization_of
from mtp_checkpoints.quantization.stored import StoredModel, stored_model
from mtp_checkpoints.sources.addresses import byte_source
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, RELEASED
from mtp_checkpoints.tensors.manifest import MANIFEST_NAME
from mtp_checkpoints.tensors.reader import Checkpoint


@dataclass(frozen=True)
class Amount:
    """Parameters and bytes of the tensors with one role and dtype, in one part."""

    part: str
    role: str
    dtype: str
    tensors: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True)
class Inspection:
    """Facts of a checkpoint; parts are those of main and mtp that the folder holds.

    layout is the name of the target that the folder is laid out for. unknown: why a model or its
    quantization cannot be followed, so that tensors are told apart by their names alone; "" where
    it can. mtp_prefix: that of the MTP tensors' names, "" for layers behind the last.
    """

    place: Place
    model_type: str
    layout: str
    quantization: str
    num_hidden_layers: int
    mtp_layers: tuple[int, ...]
    parts: tuple[str, ...]
    shards: int
    amounts: tuple[Amount, ...]
    shared_tensors: dict[str, str]
    missing_files: tuple[str, ...]
    unindexed_files: tuple[str, ...]
    repeated_files: tuple[str, ...]
    stray_files: tuple[str, ...]
    problems: tuple[Mismatch, ...]
    unknown: str = ""
    mtp_prefix: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the same facts for machines, sizes in bytes."""
        return {
            "folder": str(self.place),
            "model_type": self.model_type,
            "layout": self.layout,
            "quantization": self.quantization,
            "num_hidden_layers": self.num_hidden_layers,
            "mtp_layers": list(self.mtp_layers),
            "mtp_prefix": self.mtp_prefix,
            "parts": list(self.parts),
            "shards": self.shards,
            "tensors": sum(amount.tensors for amount in self.amounts),
            "parameters": sum(amount.parameters for amount in self.amounts),
            "size_bytes": sum(amount.size_bytes for amount in self.amounts),
            "amounts": [vars(amount) for amount in self.amounts],
            "shared_tensors": self.shared_tensors,
            "missing_files": list(self.missing_files),
            "unindexed_files": list(self.unindexed_files),
            "repeated_files": list(self.repeated_files),
            "stray_files": list(self.stray_files),
            "problems": [vars(problem) for problem in self.problems],
            "unknown": self.unknown,
        }


def parts_of_bundle(place: Place) -> dict[str, Place]:
    """Return the places of a bundle's parts by name; none of a folder that is no bundle."""
    source = byte_source(place)
    if MANIFEST_NAME not in source.names():
        return {}
    return {part: place / part for part in (MAIN, MTP) if source.names(part)}


def inspect(place: Place) -> Inspection:
    """Inspect a checkpoint, or one part of a bundle, in any precision and for any target.

    Raises UsageError for a whole bundle, InvalidInputError for files that contradict each other.
    Tensors that differ from what config.json promises are listed as problems; of a model or a
    quantization that is not known, they are counted by their names.
    """
    source = byte_source(place)
    names = source.names()
    if MANIFEST_NAME in names:
        parts = [str(place / part) for part in (MAIN, MTP) if source.names(part)]
        raise UsageError(
            "This folder is a bundle; inspect looks at one checkpoint",
            where=place,
            todo=f"Point at {' or at '.join(parts) or 'a checkpoint: the bundle has no part'}",
        )
    checkpoint = Checkpoint.read_from(source)
    try:
        layout = _layout_of(checkpoint)
    except UnsupportedError as error:
        return _by_names(checkpoint, str(error))
    stored, amounts = layout.stored, _amounts(checkpoint, layout)
    present = tuple(part for part in (MAIN, MTP) if any(own.part == part for own in amounts))
    of_format = target_of_format({shard.container for shard in checkpoint.shards})
    promised = stored.of_parts(main=MAIN in present, mtp=MTP in present)
    return Inspection(
        place=source.path,
        model_type=checkpoint.config["model_type"],
        layout=layout.target if of_format is None else of_format.name,
        quantization=describe(checkpoint.config),
        num_hidden_layers=len(stored.family.layers),
        mtp_layers=tuple(stored.family.mtp_layers),
        parts=present,
        shards=len(checkpoint.shards),
        amounts=amounts,
        shared_tensors=shared_tensors(checkpoint.tensors, stored) if MTP in present else {},
        missing_files=_missing_files(names) if of_format is None else (),
        unindexed_files=checkpoint.unindexed,
        repeated_files=tuple(one.name for one in checkpoint.repeated),
        stray_files=tuple(one.path.name for one in checkpoint.strays),
        problems=tuple(promised.differences(checkpoint.tensors)),
        mtp_prefix=stored.family.mtp_prefix,
    )


def _missing_files(names: Collection[str]) -> tuple[str, ...]:
    return tuple(one for one in ("generation_config.json", "tokenizer.json") if one not in names)


def _by_names(checkpoint: Checkpoint, reason: str) -> Inspection:
    """Return the facts of a checkpoint that cannot be followed: its MTP modules are told by their
    names, and codes count as one parameter each."""
    config, layers = checkpoint.config, main_layers(checkpoint.config)
    modules = mtp_modules(checkpoint.tensors, layers)
    own = {name for module in modules for name in module.tensors}
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in checkpoint.tensors.items():
        total = sums[MTP if name in own else MAIN, tensor.dtype]
        for place, each in enumerate((1, prod(tensor.shape), tensor.size_bytes)):
            total[place] += each
    amounts = tuple(
        Amount(part, "any", dtype, *total) for (part, dtype), total in sorted(sums.items())
    )
    usable = isinstance(quantization_of(config), dict)
    return Inspection(
        place=checkpoint.path,
        model_type=str(config.get("model_type")),
        layout=RELEASED,
        quantization=describe(config) if usable else "none",
        num_hidden_layers=layers or 0,
        mtp_layers=tuple(module.number for module in modules if module.number is not None),
        parts=tuple(part for part in (MAIN, MTP) if any(part == one.part for one in amounts)),
        shards=len(checkpoint.shards),
        amounts=amounts,
        shared_tensors={},
        missing_files=_missing_files(checkpoint.files.names()),
        unindexed_files=checkpoint.unindexed,
        repeated_files=tuple(one.name for one in checkpoint.repeated),
        stray_files=tuple(one.path.name for one in checkpoint.strays),
        problems=(),
        unknown=reason,
    )


# Part and role of tensors that reports add up; the shape of the weight, None for a scale of one.
_Kind = tuple[str, str, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Layout:
    """The names that a folder's tensors have, and what it must hold in them."""

    target: str
    stored: StoredModel

    def kinds_of(self, tensors: Mapping[str, TensorInfo]) -> tuple[list[_Kind], dict[str, int]]:
        """Return the kinds of a folder's tensors, and by name the place of its kind."""
        kinds: list[_Kind] = []
        place_of: dict[str, int] = {}
        for kind in self.stored.kinds:
            weight = kind.specs[0]
            part = MAIN if weight.mtp_layer is None else MTP
            for number, names in enumerate(kind.names):
                place_of |= dict.fromkeys(names, len(kinds))
                kinds.append((part, weight.role, None if number else weight.shape))
        for name, tensor in tensors.items():
            if name not in place_of:
                place_of[name] = len(kinds)
                carried = self.stored.family.carries(name)
                role = str(Role.OTHER_PART) if carried else "unexpected"
                kinds.append((self._part_of_unexpected(name), role, tensor.shape))
        return kinds, place_of

    def _part_of_unexpected(self, name: str) -> str:
        """Return the part that a tensor belongs to by its name."""
        if self.target != RELEASED:
            return MTP
        return MAIN if self.stored.family.mtp_layer_of(name) is None else MTP


def _layout_of(checkpoint: Checkpoint) -> _Layout:
    """Return the layout that most of a folder's tensors are named in: the released one, which holds
    both parts, or the draft of another target.

    Raises what stored_model raises for a config that no layout fits.
    """
    layouts: list[_Layout] = []
    failures: list[MtpExportError] = []
    for name, target in TARGETS.items():
        try:
            if name == RELEASED:
                config = as_engines_take(checkpoint.config, checkpoint.tensors)
                stored = stored_model(config, checkpoint.tensors)
            else:
                stored = target.stored_draft(checkpoint.config, names=checkpoint.tensors)
        except MtpExportError as error:
            failures.append(error)
        else:
            layouts.append(_Layout(name, stored))
    if not layouts:
        raise failures[0]
    if len(layouts) == 1:
        return layouts[0]
    return max(layouts, key=lambda own: sum(n in checkpoint.tensors for n in own.stored.names))


def _amounts(checkpoint: Checkpoint, layout: _Layout) -> tuple[Amount, ...]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    kinds, place_of = layout.kinds_of(checkpoint.tensors)
    stored = ((place_of[t.name], t.dtype, t.size_bytes) for t in checkpoint.tensors.values())
    for (place, dtype, size_bytes), tensors in Counter(stored).items():
        part, role, shape = kinds[place]
        kind: str = dtype
        if shape is None:
            kind += " shape" if dtype is DType.I64 else " scale"
        total = sums[part, str(role), kind]
        for number, each in enumerate((1, 0 if shape is None else prod(shape), size_bytes)):
            total[number] += tensors * each
    order = [str(role) for role in Role]
    return tuple(
        Amount(*key, *values)
        for key, values in sorted(
            sums.items(), key=lambda item: (item[0][0], (order + ["unexpected"]).index(item[0][1]))
        )
    )


def shared_tensors(tensors: Mapping[str, TensorInfo], stored: StoredModel) -> dict[str, str]:
    """Return, per MTP copy of embedding and head, a sentence on where it is stored."""
    result: dict[str, str] = {}
    for pair in stored.family.shared:
        copy, original = (stored.tables.get(name) for name in (pair.mtp_name, pair.main_name))
        assert copy is not None, "a layout with MTP layers"
        name = copy.tensors[0].name
        own = tensors.get(name)
        main = None if original is None else tensors.get(original.tensors[0].name)
        if own is None:
            result[name] = f"not stored: tied to {pair.main_name}"
        elif main is None:
            result[name] = f"own copy; {pair.main_name} is not in this folder"
        elif original is not None and copy.storage is not original.storage:
            result[name] = (
                f"own copy in {copy.storage}, {pair.main_name} in {original.storage}: both are"
                " dequantized to be compared"
            )
        elif (own.dtype, own.shape) == (main.dtype, main.shape):
            result[name] = f"own copy, same dtype and shape as {pair.main_name}"
        else:
            result[name] = f"own copy, unlike {pair.main_name}"
    return result
