"""The config.json by which every tensor of a checkpoint is as it is stored, where its own is wrong:
in one field or a few, or in the level of its text part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import getitem
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import MtpExportError
from mtp_checkpoints.families.signs import (
    COUNT_FIELDS,
    LAYER_FIELDS,
    NESTED,
    Announced,
    announced,
    count_field,
    layer_numbers,
    main_layers,
    mtp_modules,
    projection_in_main,
)
from mtp_checkpoints.layouts.llama_cpp import LLAMA_CPP
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP, RELEASED
from mtp_checkpoints.tensors.untied_head import TIED
from mtp_export.verify.evidence.other_kinds import fields_of, kinds_as_stored, sizes_as_stored
from mtp_export.verify.evidence.parts import in_one, layer_count, layout_of

if TYPE_CHECKING:
    from mtp_checkpoints.tensors.reader import Checkpoint
    from mtp_export.verify.evidence.parts import OpenedPlace, PartLayout

_Config = Mapping[str, Any]
_MOST_FIELDS, _MOST_TRIED = 4, 10  # that are changed together, and of which one is chosen
_DENSE = "first_k_dense_replace"


@dataclass(frozen=True)
class OtherValue:
    """A field of config.json, with its value and that by which the tensors are as stored."""

    field: str
    said: Any
    stored: Any


@dataclass(frozen=True)
class OtherConfig:
    """A config.json by which all tensors are as stored: the fields that it has otherwise, or the
    place of its text part, and the one where that is. folder: that of a draft of its own, "" for
    the main model's."""

    config: _Config
    values: Sequence[OtherValue] = ()
    place: str = ""
    found: str = ""

    @property
    def counts(self) -> bool:
        """True where it counts layers or modules otherwise, or its text part is elsewhere."""
        fields = {one.field.rpartition(".")[2] for one in self.values}
        return bool(self.place) or not fields.isdisjoint((*LAYER_FIELDS, *COUNT_FIELDS))

    folder: str = ""


def other_config(opened: OpenedPlace) -> OtherConfig | None:
    """Return the config.json that is to be in the place of a checkpoint's own; None where that
    describes the tensors, or no other is found that does."""
    parts = opened.parts
    checkpoints = [part.checkpoint for part in parts if part.checkpoint is not None]
    in_one_place = len({part.place for part in parts}) == 1 and len(checkpoints) == len(parts)
    if not opened.is_bundle and not in_one_place and opened.target.name == RELEASED:
        return _of_main_count(opened)
    if opened.is_bundle or not in_one_place or opened.target.name not in (RELEASED, LLAMA_CPP.name):
        return None
    layouts = opened.layouts
    if len(layouts) == len(parts) and not any(layout.differences for layout in layouts):
        return None
    whole = checkpoints[0].with_shards(s for one in checkpoints[1:] for s in one.shards)
    trial = _Trial(opened, whole)
    followed = len(layouts) == len(parts)
    tried = [*_of_other_counts(whole, fewer=not followed)]
    of_all = not followed or any(one.differences for one in layouts if one.name == MAIN)
    if of_all:  # else what differs is the module's
        tried += [*_moved(whole.config), *_turned_on(whole.config), *_of_dense(whole)]
        of_layers = [*sizes_as_stored(whole.config, whole.tensors, layouts if followed else ())]
        of_layers += kinds_as_stored(whole.config, layouts) if followed else ()
        tried += [_with(whole.config, [change]) for change in of_layers]
    for other in tried:
        if (found := trial.layouts(other.config)) is not None and not _differing(found):
            return other
    return _of_another_size(trial, layouts) if followed and of_all else None


def _of_main_count(opened: OpenedPlace) -> OtherConfig | None:
    """Return the config of a draft's own folder with the main model's number of layers, by which
    alone its tensors are as stored; None where that is not so."""
    main, draft = opened.main, opened.part(MTP)
    if main is None or draft is None or draft.checkpoint is None:
        return None
    config, count = draft.checkpoint.config, main_layers(main.config)
    said = next((pair for pair in _numbers(config) if pair[0][-1] in LAYER_FIELDS), None)
    if said is None or count is None or said[1] == count:
        return None
    other = _with(config, [(*said, count)])
    changed = replace(draft, checkpoint=replace(draft.checkpoint, config=dict(other.config)))
    try:
        layout = layout_of(changed, opened.target, count)
    except MtpExportError:
        return None
    return None if layout.differences else replace(other, folder=str(draft.place))


@dataclass(frozen=True)
class _Trial:
    """A checkpoint whose config.json is tried otherwise."""

    opened: OpenedPlace
    whole: Checkpoint

    def layouts(self, config: _Config) -> list[PartLayout] | None:
        """Return what the parts must hold by another config.json; None for one that cannot be
        followed."""
        parts = in_one(self.opened.parts[0].place, replace(self.whole, config=dict(config)))
        layers = layer_count(part.checkpoint for part in parts if part.checkpoint is not None)
        try:
            return [layout_of(part, self.opened.target, layers) for part in parts]
        except MtpExportError:
            return None


def _differing(layouts: Sequence[PartLayout]) -> int:
    return sum(len(layout.differences) for layout in layouts)


def _moved(config: _Config) -> Iterator[OtherConfig]:
    """Yield configs whose text part is where a config nests it twice, or not at all."""
    for name in NESTED:
        inner = config.get(name)
        if not isinstance(inner, Mapping):
            own = {key: value for key, value in config.items() if key not in _OF_THE_WHOLE}
            own = {key: value for key, value in own.items() if not isinstance(value, Mapping)}
            yield OtherConfig({**config, name: own}, place=name, found="config.json itself")
            continue
        for other, deeper in inner.items():
            if isinstance(deeper, Mapping) and other in NESTED:
                found = f"{name}.{other}"
                yield OtherConfig({**config, name: deeper}, place=name, found=found)
        rest = {key: value for key, value in config.items() if key != name}
        yield OtherConfig({**inner, **rest}, place="config.json itself", found=name)


_OF_THE_WHOLE = frozenset({"architectures", "model_type", "auto_map", "transformers_version"})


def _of_other_counts(whole: Checkpoint, *, fewer: bool) -> Iterator[OtherConfig]:
    """Yield configs that count as many main layers as are there, or as many MTP modules, where more
    are than are said to be. fewer: as many or less, where no model follows from what is said."""
    config, names = whole.config, whole.tensors
    said, wanted = main_layers(config), announced(config)
    last = max(layer_numbers(names), default=0) + 1
    modules = wanted.count or 0 if wanted is not None else 0
    numbered = not mtp_modules(names, None)  # modules, behind the main layers
    is_rest = said is not None and numbered and 0 < last - said <= modules  # of a module
    if said is not None and not is_rest and projection_in_main(names, said) is None:
        lower = last - modules
        for count in dict.fromkeys((last, lower)):
            if 0 < count != said and (fewer or count > said):
                path = next(path for path, value in _numbers(config) if path[-1] in LAYER_FIELDS)
                yield _with(config, [(path, said, count)])
    none = Announced(0, count_field(config).partition(" ")[0])
    field, announces = (wanted or none).field, (wanted or none).count
    if not field or announces is None or "model_type" in field:
        return
    there = sum(one.number is not None for one in mtp_modules(names, said))
    path = tuple(field.split("."))
    for count in dict.fromkeys((there, 1)):  # whose layers may have numbers of their own
        if count > announces or (count < announces and fewer):
            yield _with(config, [(path, reduce(getitem, path, config), count)])


def _turned_on(config: _Config) -> Iterator[OtherConfig]:
    """Yield configs with one field more true, by which a layer has tensors. A head may be lost."""
    for path, value in _values(config):
        if value is False and path[-1] != TIED:
            yield _with(config, [(path, value, True)])


def _of_dense(whole: Checkpoint) -> Iterator[OtherConfig]:
    """Yield the config with experts from the layer on that is the first to have some."""
    of_experts = layer_numbers(name for name in whole.tensors if EXPERTS in name)
    for path, value in _values(whole.config):
        if path[-1] == _DENSE and of_experts and value != min(of_experts):
            yield _with(whole.config, [(path, value, min(of_experts))])


_Path = tuple[str, ...]


def _of_another_size(trial: _Trial, layouts: Sequence[PartLayout]) -> OtherConfig | None:
    """Return the config with other sizes by which all is as stored: field after field the one by
    which the fewest tensors differ."""
    config, changes = dict(trial.whole.config), list[tuple[_Path, int, int]]()
    left = _differing(layouts)
    while left and len(changes) < _MOST_FIELDS:
        best = None
        for change in _changes(config, layouts)[:_MOST_TRIED]:
            found = trial.layouts(_with(config, [change]).config)
            if found is not None and (count := _differing(found)) < left:
                best, left = (change, found), count
        if best is None:
            return None
        changes, layouts = [*changes, best[0]], best[1]
        config = dict(_with(config, [best[0]]).config)
    return None if left else _with(trial.whole.config, changes)


def _changes(config: _Config, layouts: Sequence[PartLayout]) -> list[tuple[_Path, int, int]]:
    """Return other values of fields by which some size is as stored, those first that are such a
    size, or by which most are: sizes are products of fields, or sums of such products."""
    sizes, likely = _other_sizes(layouts), _likely_words(layouts)
    found = dict[tuple[_Path, int, int], tuple[bool, bool, int]]()
    counts = {value for path, value in _numbers(config) if _HEADS in path[-1]}
    heads = {1, *counts, *(sum(pair) for pair in product(counts, repeat=2))}  # joined ones too
    for path, value in _numbers(config):
        if value < 1 or path[-1].endswith(_NO_SIZES):
            continue
        for (size, stored), count in sizes.items():
            others = {value * stored // size} if value * stored % size == size % value == 0 else ()
            if path[-1].endswith(_SUMMED):
                others = {*others, *(value - (size - stored) // one for one in heads if one)}
            for other in others:
                if 0 < other != value:
                    exact, _, explained = found.get((path, value, other), (False, False, 0))
                    is_likely = any(word in path[-1] for word in likely)
                    exact = exact or value == size
                    found[path, value, other] = (exact, is_likely, explained + count)
    return sorted(found, key=found.__getitem__, reverse=True)


_HEADS, _SUMMED = "heads", "_dim"
# Words of fields that have the sizes of a part, by words of the names of its tensors.
_FIELDS = {"att": ("head", "_dim", "_rank"), "mlp": ("intermediate",), "expert": ("intermediate",)}


def _likely_words(layouts: Sequence[PartLayout]) -> tuple[str, ...]:
    """Return words of the fields of the part that all that differs is of; none of several."""
    names = [one.tensor for layout in layouts for one in layout.differences]
    return next((own for word, own in _FIELDS.items() if all(word in name for name in names)), ())


_NO_SIZES = ("_per_tok", "_position_embeddings", "_token_id", "_layers", "_group", "topk")


def _other_sizes(layouts: Sequence[PartLayout]) -> Mapping[tuple[int, int], int]:
    """Sizes of values or codes with those that they are stored in, and how many are."""
    sizes = dict[tuple[int, int], int]()
    for layout in layouts:
        for one in layout.differences:
            weight, there = layout.stored.weight_of.get(one.tensor), layout.checkpoint.tensors
            if weight is None or one.tensor not in there or one.tensor != weight.tensors[0].name:
                continue
            for pair in zip(weight.tensors[0].shape, there[one.tensor].shape, strict=False):
                if pair[0] != pair[1] and min(pair) > 0:
                    sizes[pair] = sizes.get(pair, 0) + 1
    return sizes


def _values(config: _Config) -> Iterator[tuple[_Path, Any]]:
    """Yield the single values of a config.json and its text part, each with the way to it."""
    return ((path, one) for path, one in fields_of(config) if not isinstance(one, list))


def _numbers(config: _Config) -> Iterator[tuple[_Path, int]]:
    return ((path, value) for path, value in _values(config) if type(value) is int)


def _with(config: _Config, changes: Sequence[tuple[_Path, Any, Any]]) -> OtherConfig:
    """Return the config with other values of fields."""
    values = [one for path, *pair in changes for one in _differing_values(".".join(path), *pair)]
    for path, _, stored in changes:
        config = with_value_at(config, path, stored)
    return OtherConfig(config, values)


def _differing_values(field: str, said: Any, stored: Any) -> Iterator[OtherValue]:
    """Yield a field; of one that lists, each of its values that is another."""
    if not isinstance(said, list) or not isinstance(stored, list):
        yield OtherValue(field, said, stored)
        return
    for number, pair in enumerate(zip(said, stored, strict=True)):
        if pair[0] != pair[1]:
            yield OtherValue(f"{field}[{number}]", *pair)


def with_value_at(config: _Config, path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a config.json with another value of a field, by the way to it."""
    first, *rest = path
    return {**config, first: with_value_at(config[first], rest, value) if rest else value}
