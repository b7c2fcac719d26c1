"""The lists of a checkpoint's quantization_config as they have to be for its tensors: changed until
every engine's reading of them is in order, which is tried before it is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.containers.base import CONFIG_NAME, quantization_field
from mtp_checkpoints.layouts import engine_of
from mtp_checkpoints.quantization.native import quantization_of, replaced_quantization
from mtp_checkpoints.tensors.reader import MODELOPT_FILE
from mtp_export.verify.check import CORRECTED, ENGINE, LISTS, TO_ADD, TO_TAKE, Item, Status
from mtp_export.verify.diagnosis.causes import lists as list_causes
from mtp_export.verify.evidence.parts import are_in_one_place
from mtp_export.verify.files.list_entries import lists_in, with_list, without

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_Lists = Mapping[str, Any]
_MOST_CHANGES = 8  # one after another: what an entry hid is found without it
_SHOWN_CHARACTERS = 1200  # of lists that are shown whole


def with_correction(
    context: Context, items: Sequence[Item], judged: Callable[[Context], Iterable[Item]]
) -> Sequence[Item]:
    """Items on a checkpoint, those of lists with what to take out of them and to add, and, where
    that is all that is wrong, with the lists as the repair. judged: the items of another config."""
    advised = {item.name for item in items if _is_advised(item)}
    if not advised or context.is_bundle or not are_in_one_place(context.parts):
        return items
    written = quantization_of(context.checkpoints[context.parts[0].name].config)
    spared, (lists, left) = "", _mended(context, written, items, judged)
    wrong = {item.name: item for item in left if item.status is Status.FAIL}
    if wrong:  # names of an engine's may be other modules' to all
        for engine in dict.fromkeys(item.data[ENGINE] for item in left if ENGINE in item.data):
            others, of_them = _mended(context, written, items, judged, engine)
            found = {item.name: item for item in of_them if item.status is Status.FAIL}
            if all(one.data.get(ENGINE) == engine for one in found.values()):
                spared, lists, left, wrong = engine, others, of_them, found
                break
    mended = advised - {item.name for item in wrong.values() if _is_advised(item)}
    if not mended:
        return items
    read = [one for one in wrong.values() if ENGINE in one.data]
    refused = [one for one in read if one.data[ENGINE] == spared or not _is_advised(one)]
    whole = len(refused) == len(wrong) and any(item.name not in wrong for item in left)
    correction = _Correction(context, written, lists, refused)
    return [correction.told(item, mended, whole=whole, wrong=wrong) for item in items]


def _mended(
    context: Context,
    written: _Lists,
    items: Sequence[Item],
    judged: Callable[[Context], Iterable[Item]],
    spared: str = "",
) -> tuple[_Lists, Sequence[Item]]:
    """Return the lists that the advice of items leads to, and the items of them; without that for
    the engine `spared`, whose names are another module's for others."""
    lists, left = written, items
    for _ in range(_MOST_CHANGES):
        changed = _changed(lists, [one for one in left if one.data.get(ENGINE) != spared])
        if changed == lists:
            break
        lists, left = changed, [*judged(_with_lists(context, changed))]
    return lists, left


def _is_advised(item: Item) -> bool:
    return item.status is Status.FAIL and bool(item.data.get(TO_ADD) or item.data.get(TO_TAKE))


def _changed(lists: _Lists, items: Iterable[Item]) -> _Lists:
    """Return a quantization_config without the entries that failures blame, and with those that it
    lacks by them."""
    failed = [item.data for item in items if item.status is Status.FAIL]
    for key, entries in (pair for data in failed for pair in data.get(TO_TAKE, {}).items()):
        for entry in entries:
            if key in lists_in(lists) and _has(lists_in(lists)[key], entry):
                lists = without(lists, key, entry)
    for key, entries in (pair for data in failed for pair in data.get(TO_ADD, {}).items()):
        own = lists_in(lists).get(key) or type(entries)()
        if isinstance(entries, dict):  # the first that is for a module decides
            lists = with_list(lists, key, {**entries, **own})
        else:
            lists = with_list(lists, key, [*dict.fromkeys([*own, *entries])])
    return lists


def _has(value: object, entry: object) -> bool:
    return entry in value if isinstance(value, list | dict) else value == entry


def _with_lists(context: Context, lists: _Lists) -> Context:
    """Return a context in which config.json has other lists."""
    parts = [
        replace(one, checkpoint=replace(one.checkpoint, config=config))
        for one in context.parts
        if one.checkpoint is not None
        for config in [replaced_quantization(one.checkpoint.config, lists)]
    ]
    return replace(context, parts=tuple(parts), _layouts={})


class _Correction:
    """Lists that differ from those that are written, in words and as they are to be written."""

    def __init__(
        self, context: Context, written: _Lists, lists: _Lists, refused: Sequence[Item]
    ) -> None:
        own = lists_in(lists)
        old = {key: lists_in(written).get(key) for key in own} | dict(lists_in(written))
        changed = [key for key in old if old[key] != own.get(key)]
        self.taken = {key: less for key in changed if (less := _beside(old[key], own.get(key)))}
        self.added = {key: _more(own.get(key), old[key]) for key in changed}
        self.added = {key: more for key, more in self.added.items() if more}
        self.lists = {key: own.get(key) for key in changed}
        self.words = list_causes.lists_corrected(self.taken, self.added)
        for item in refused:
            title = engine_of(item.data[ENGINE]).title
            self.words += list_causes.refused_by_engine(title, item.cause.removesuffix("."))
        self.place = _place(context, written)

    @property
    def repair(self) -> str:
        """The lists as they are to be written, or what is to be taken out of them and added, as
        JSON; "" where that too is too long to be shown."""
        whole = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.lists.items()]
        steps = [f"{json.dumps(key)}: {self._steps(key)}" for key in self.lists]
        texts = (",\n".join(whole), "\n".join(steps))
        return next((text for text in texts if len(text) <= _SHOWN_CHARACTERS), "")

    def _steps(self, key: str) -> str:
        if not isinstance(self.lists[key], list | dict):
            return json.dumps(self.lists[key])
        steps = (("take out", self.taken.get(key)), ("add", self.added.get(key)))
        return ", and ".join(f"{what} {json.dumps(some)[1:-1]}" for what, some in steps if some)

    def told(self, item: Item, mended: set[str], *, whole: bool, wrong: Mapping[str, Item]) -> Item:
        """An item with the correction, where it fails and is mended by it."""
        if item.status is not Status.FAIL or item.name in wrong:
            return item
        if item.name in mended:
            problems = item.data.get("problems", [{"words": item.cause.removesuffix(".")}])
            first, *others = problems
            words = f"{first['words']}{self.words}"
            data = {**item.data, TO_ADD: self.added, TO_TAKE: self.taken}
            if "problems" in data:
                data["problems"] = [{**first, "words": words}, *others]
            item = replace(item, cause=item.cause.replace(first["words"], words, 1), data=data)
        if not whole:
            return item
        data = {**item.data, CORRECTED: self.place, LISTS: self.lists}
        return replace(item, repair=self.repair, data=data)


def _place(context: Context, written: _Lists) -> str:
    """Return where the lists of a config are, in words."""
    if lists_in(written) is not written and MODELOPT_FILE in context.files.names():
        return f"quantization of {MODELOPT_FILE}"
    config = context.checkpoints[context.parts[0].name].config
    return f"{quantization_field(config)} of {CONFIG_NAME}"


def _beside(value: object, other: object) -> list[str]:
    """Return the entries of a list or object that another one has not."""
    if not isinstance(value, list | dict):
        return [] if value is None or other is not None else [json.dumps(value)]
    there = other if isinstance(other, list | dict) else ()
    return [str(one) for one in value if one not in there]


def _more(value: object, other: object) -> Any:
    """Return what a list or object has more than another one."""
    there = other if isinstance(other, list | dict) else ()
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if name not in there}
    return [one for one in value if one not in there] if isinstance(value, list) else []
