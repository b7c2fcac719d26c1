"""Causes of failures of weights that are there under other names, or under none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from mtp_checkpoints.families.renamed import InPlace, OtherNames, Renamed
from mtp_checkpoints.families.stored_names import as_any_expert
from mtp_export.progress import shortened

_ADAPTER = ".lora_"  # in the names of PEFT's tensors
_SINGLY = 5  # that are named one by one: the report's data has all


def under_other_names(found: OtherNames, of: str = "the module") -> str:
    """Each weight that is under another name with the name that it should have, by rules where
    several are renamed alike, and what no name is known of."""
    said = [
        *_by_beginnings(found),
        *(_inside(one) for one in found.inside),
        *_singly(found.singly),
        *_several_joined(found.joined),
        *(_alike(one) for one in found.alike),
    ]
    count = len(found.pairs) + sum(len(one.found) for one in (*found.joined, *found.alike))
    return (
        f"tensors of {of} are there under other names ({count:,}): {'; '.join(said)}. Rename"
        " them so, with their scales if they have any, in the files and in the"
        f" index{_untold(found)}"
    )


def no_values_by_its_name(name: str) -> str:
    """name: that of a weight in a quantization that is not read."""
    return f"{name} is missing: no values are there by its name, in whatever quantization"


def _by_beginnings(found: OtherNames) -> Iterator[str]:
    if words := _by_numbers(found.beginnings):
        yield words
        return
    for one in found.beginnings:
        those = "them" if one.count == len(found.pairs) else f"{one.count:,}"
        if not one.wanted:
            yield f"engines look for {those} without {one.found}. before each"
        elif not one.found:
            yield f"engines look for {those} with {one.wanted}. before each"
        else:
            yield f"{one.count:,} begin with {one.found}, where engines look for {one.wanted}"


_NUMBERED = re.compile(r"(.+\.)(\d{1,6})", re.ASCII)
_SEVERAL = 3  # layers of which a rule is said


def _by_numbers(beginnings: Sequence[Renamed]) -> str:
    """Return what is said of layers that all lie as far behind or before their own numbers."""
    shifts = set[tuple[str, str, int]]()
    for one in beginnings:
        wanted, found = _NUMBERED.fullmatch(one.wanted), _NUMBERED.fullmatch(one.found)
        if wanted is None or found is None:
            return ""
        shifts.add((wanted[1], found[1], int(found[2]) - int(wanted[2])))
    if len(beginnings) < _SEVERAL or len(shifts) > 1 or any(w != f for w, f, _ in shifts):
        return ""
    (_, _, by), first, last = *shifts, beginnings[0], beginnings[-1]
    return (
        f"layers have numbers that are too {'high' if by > 0 else 'low'} by {abs(by)}, from"
        f" {first.found}, where engines look for {first.wanted}, to {last.found}, where they look"
        f" for {last.wanted}"
    )


def _inside(one: InPlace) -> str:
    return (
        f"{len(one.found):,} have {one.part} in them, such as {one.found[0]}, where engines look"
        f" for {one.wanted[0]}, without it"
    )


def _singly(pairs: Mapping[str, str]) -> list[str]:
    """Those of several experts as one where these are renamed alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for found, wanted in pairs.items():
        alike.setdefault((as_any_expert(found), as_any_expert(wanted)), []).append(found)
    said = [
        f"{found} ({len(own):,}) lies where engines look for {wanted}"
        if len(own) > 1
        else f"{own[0]} lies where engines look for {pairs[own[0]]}"
        for (found, wanted), own in alike.items()
    ]
    more = len(said) - _SINGLY
    return [
        *said[:_SINGLY],
        *([f"{more:,} more, which the report lists (--report)"] if more > 0 else []),
    ]


def _several_joined(joined: Sequence[InPlace]) -> Iterator[str]:
    """Those of several experts as one where these are joined alike."""
    alike: dict[tuple[str, ...], list[InPlace]] = {}
    for one in joined:
        alike.setdefault((*map(as_any_expert, one.found),), []).append(one)
    for names, own in alike.items():
        several = f"{names[0]} ({len(own):,})" if len(own) > 1 else ""
        yield _joined(own[0], several or own[0].found[0])


def _joined(one: InPlace, name: str) -> str:
    """By its shape alone: how its rows lie, and whether by heads, no header says. name: what joins
    the rows of several, of many experts perhaps."""
    if len(one.found) > 1:
        return (
            f"{shortened(one.found, _SINGLY)} are parts of {one.wanted[0]}, which engines look for"
            " as one (what converted it has to join them)"
        )
    *first, last = [name.rsplit(".", 2)[-2] for name in one.wanted]
    return (
        f"{name} joins the rows of {', '.join(first)} and {last}, which engines look for one by one"
        " (what converted it has to take them apart)"
    )


def _alike(one: InPlace) -> str:
    return (
        f"{shortened(one.found, _SINGLY)} are {shortened(one.wanted, _SINGLY)} by their shapes, and"
        " neither names nor shapes tell which is which"
    )


def _untold(found: OtherNames) -> str:
    words = ""
    if found.untold:
        words += f". No engine looks for {shortened(found.untold, _SINGLY)} either"
        if any(_ADAPTER in name for name in found.untold):
            words += ": an adapter that was not merged into the weights beside it"
    if found.lacking:
        words += f". Under no name: {shortened(found.lacking, _SINGLY)}"
    return words
