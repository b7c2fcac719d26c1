"""Causes that lists of a quantization_config are: what an engine makes of them, and how they are
corrected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtp_checkpoints.families.base import SGLANG_DRAFT

_SINGLE_EXPERT = re.compile(r"\.experts\\?\.\d")
_MOST_ENTRIES = 6  # of a list that are named one by one


def misread_by_engine(reason: str, problem: object) -> str:
    """reason: of the engine's own reading of the draft."""
    return f"{reason}: {problem}"


def recomputed_not_skipped(tensor: str) -> str:
    return (
        f"{tensor} is a rotary frequency that other engines skip, and this one's loader of the"
        " draft ends with a KeyError: leave it out of the shard and of the index"
    )


def not_left_out(config: str, count: int, module: str, part: str, idle: Sequence[str]) -> str:
    """config: the name of the one with the lists. idle: entries that are there and act on
    nothing."""
    others = f", like {len(idle) - 1} more," if len(idle) > 1 else ""
    blamed = f" ({idle[0]}{others} {_idle_words(idle[0])})" if idle else ""
    some = _Matrices.of(count, module, part)
    return (
        f"{some.are} stored unquantized, and {config} leaves {some.them} out nowhere{blamed}, so"
        f" that {some.they_are} built quantized"
    )


class _Matrices(NamedTuple):
    """Words for one matrix of a part, or several."""

    are: str
    they_are: str
    they_were: str
    them: str

    @classmethod
    def of(cls, count: int, module: str, part: str) -> _Matrices:
        if count == 1:
            return cls(f"{module}, a matrix of {part}, is", "it is", "it was", "it")
        several = f"{count:,} matrices of {part}, such as {module}, are"
        return cls(several, "they are", "they were", "them")


def _idle_words(entry: str) -> str:
    if _SINGLE_EXPERT.search(entry):
        return "acts on nothing: all experts of a layer are one module here"
    return "matches no module of it"


def lists_corrected(taken: Mapping[str, Sequence[str]], added: Mapping[str, Sequence[str]]) -> str:
    """taken, added: entries by their lists, of which --json has all."""
    by_names = dict[tuple[str, ...], list[str]]()
    for key, names in added.items():
        by_names.setdefault(tuple(names), []).append(key)
    steps = [f"take {_named(names, 'to_take')} out of {key}" for key, names in taken.items()]
    for own, keys in by_names.items():
        lists = "it" if keys == [*taken] else " and to ".join(keys)
        steps.append(f"add {_named(own, 'to_add')} to {lists}")
    words = f": {' and '.join(steps)}"
    entries = (entry.replace("\\", "") for own in by_names for entry in own)
    if any(SGLANG_DRAFT in entry for entry in entries):
        words += f" ({SGLANG_DRAFT} is SGLang's name of the draft's layer)"
    return words


def _named(names: Sequence[str], field: str) -> str:
    if len(names) <= _MOST_ENTRIES:
        return ", ".join(names)
    rest = f"{len(names) - 2} more, each by its whole name (data.{field} of --json),"
    return f"{', '.join(names[:2])} and {rest}"


def refused_by_engine(engine: str, why: str) -> str:
    """why: what no entry mends."""
    return f". That alone mends nothing for {engine}: {why}"


def built_quantized(module: str, storage: str) -> str:
    return (
        f"{module} is stored unquantized and left out by no list: the engine builds it in"
        f" {storage}, and fails to load it, or reads its values as codes"
    )


def projection_built(module: str, storage: str, field: str) -> str:
    """module: as the engine calls it, so that no entry of the checkpoint's own name acts on it."""
    return (
        f"it is stored unquantized, and the engine builds it in {storage}, as {module}, which no"
        f" entry of {field} is for"
    )


def quantized_where_plain(module: str, engines: str) -> str:
    """engines: one or several that build it unquantized, in words."""
    build, they = ("build", "they") if " and " in engines else ("builds", "it")
    return (
        f"{module} is stored quantized, and {engines} {build} it as an unquantized linear: {they}"
        " cannot load it. Leave it out when quantizing, or graft the original's layer"
    )


NO_TARGET = "no target of config_groups is for them"


def left_out_though_quantized(config: str, count: int, module: str, entry: str, part: str) -> str:
    """config: the name of the one with the lists, "" of none. entry: what leaves it out, "" where
    that is not one entry."""
    blame, some = f" ({entry})" if entry else "", _Matrices.of(count, module, part)
    left_out, mend = f"{config} leaves {some.them} out{blame}", ""
    if not config:
        left_out = "config.json has no quantization_config"
        mend = f": put the one back that {some.they_were} quantized with"
    return (
        f"{some.are} stored quantized, and {left_out}, so that {some.they_are} built"
        f" unquantized{mend}"
    )


def built_unquantized(engine: str, drafts: str) -> str:
    """drafts: which, and that they are unquantized, in words."""
    return f"{engine} builds {drafts}"


def layer_known_as(engine: str, layer: str, replaced: str) -> str:
    """layer: "" where the engine has no name for it. replaced: what it replaces in entries."""
    must = "which entries of ignore and the like must match"
    if not layer:
        return f"{engine} knows the draft's linears without the name of their layer, {must}"
    also = f", with {replaced} in them replaced as it is written" if replaced else ""
    return f"{engine} knows the draft's layer as {layer}, {must}{also}"


def quantized_in_vain(count: int, module: str) -> str:
    some = _Matrices.of(count, module, "the MTP module")
    return (
        f"{some.are} stored quantized: serve the model with another engine, or graft the original's"
        " unquantized layer"
    )
