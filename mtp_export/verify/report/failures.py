"""Failures of a report by their causes: what fails because of one thing is told once."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from mtp_checkpoints.families.stored_names import as_any_expert, as_experts
from mtp_checkpoints.tensors.bundle_folder import MAIN
from mtp_export.progress import shortened
from mtp_export.verify.check import (
    CORRECTED,
    ENGINE,
    EQUAL,
    FUSED_IN,
    GAIN,
    KNOWS_MORE,
    MTP_MODULE,
    NAMES_HERE,
    UNDONE,
    UNFINISHED,
    Item,
    Status,
    unknown_words,
)
from mtp_export.verify.report.report import Report

_STATIC = ("files", "ledger", "weights")  # checks whose subjects are tensors and files
_SHARD = ".safetensors"
_ENGINES_LAYER = "model.decoder."  # as an engine calls the draft's layer
MOST_CAUSES = 5  # that a page or a message tells
_MOST_NAMES, _MOST_SENTENCES = 3, 5
_LAYER_PARTS = 3  # of a layer's name
_GRAFT = "mtp-export graft "
_MARK = "§"
_NAME_OR_FIGURE = re.compile(r"[\w/*-]++(?:\.[\w*-]+)+|\b(?:main|mtp)/|\d[\d,.]*")


@dataclass
class Cause:
    """Failed items that have one cause.

    check: the one whose words tell it. items: those that fail, each behind its check's name.
    subjects: tensors and files at fault, files by their paths in the bundle. signs: what is said of
    them, without their names and figures. told: the items' own causes. parts: those that the items
    are about, or the items' names. said: subjects with the sign of what is said of each.
    """

    check: str
    items: list[tuple[str, Item]]
    words: list[str]
    subjects: set[str]
    signs: set[str]
    told: set[str]
    parts: set[str]
    said: set[tuple[str, str]]

    @property
    def title(self) -> str:
        """Names of the first items, each behind its check's, and how many more there are."""
        return shortened([f"{check}, {item.name}" for check, item in self.items], _MOST_NAMES, "; ")

    @property
    def text(self) -> str:
        """The first sentences on what is wrong, as one."""
        return shortened(self.words, _MOST_SENTENCES, "; ")

    @property
    def is_vague(self) -> bool:
        """True where each item says several explanations that are equal."""
        return all(item.data.get(EQUAL, 1) > 1 for _, item in self.items)

    @property
    def explains_drafts(self) -> bool:
        """True where an item undoes what is wrong with the drafts, and names that alone."""
        return any(
            check == "acceptance" and item.data.get(EQUAL) == 1 for check, item in self.items
        )

    def is_of(self, drafts: Cause) -> bool:
        """True where the MTP module has, by several explanations, what undoing one thing of its
        drafts explains, or one that gains no more than that gives: any part of a damaged module
        makes up for some of it."""
        gain = max(item.data.get(GAIN, math.inf) for _, item in self.items)
        undone = (one["gain"]["value"] for _, item in drafts.items for one in _undone(item))
        follows = self.is_vague or gain <= max(undone, default=0.0)
        return follows and all(MTP_MODULE in item.name for _, item in self.items)

    @property
    def repairs(self) -> list[str]:
        """Commands that mend it, each once: none gives a main model back its weights with those of
        an MTP layer."""
        commands = dict.fromkeys(item.repair for _, item in self.items if item.repair)
        return [one for one in commands if MAIN not in self.parts or not one.startswith(_GRAFT)]

    def _not_said(self, item: Item) -> Iterator[str]:
        """Yield what an item is about that the cause does not say the same of."""
        return (name for name, sign in _said(item) if (name, sign) not in self.said)

    def add(self, item: Item, other: Cause, report: Report, *, explains: bool) -> None:
        """Add what fails for this cause too. The comparison with the source knows more of a tensor
        than checks without one, and of configs every check says something else. explains: the item
        is a comparison that finds all tensors of an earlier item changed."""
        is_new, says_the_same = item.cause not in self.told, other.signs <= self.signs
        explains = explains and not other.subjects <= self.subjects
        is_told = ENGINE in item.data or not is_new
        more = [*self._not_said(item)] if says_the_same and not is_told else []
        self.items += other.items
        self.subjects |= other.subjects
        self.said |= other.said
        self.signs |= other.signs
        self.told |= other.told
        self.parts |= other.parts
        if is_told:
            return
        if says_the_same:
            self.words += [_likewise(report, more)] if more else []
        elif not other.subjects:
            return
        elif explains or any(_is_file(subject) for subject in other.subjects):
            self.words += other.words
        elif (self.check, other.check) == ("ledger", "weights") or KNOWS_MORE in item.data:
            self.check, self.words = other.check, other.words


@lru_cache(maxsize=1)  # one verdict asks several times, of 91,991 tensors perhaps
def causes_of(report: Report) -> Sequence[Cause]:
    """Return the causes of the failed items, in the order of the first of each, but for those of
    several explanations that are equal: what is told by one comes first, and where that is how the
    MTP module drafts, it is what the several of the module are of."""
    found = _Causes(report)
    for result, item in report.items:
        if item.status is Status.FAIL:
            found.take(result.name, item)
    vague = [cause for cause in found.causes if cause.is_vague]
    sure = [cause for cause in found.causes if not cause.is_vague]
    of_drafts = next((cause for cause in sure if cause.explains_drafts), None)
    told = list[Cause]()
    for cause in (*sure, *vague):
        if of_drafts is not None and cause is not of_drafts and cause.is_of(of_drafts):
            of_drafts.items += cause.items
        else:
            told.append(cause)
    return told


def _undone(item: Item) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = item.data.get(UNDONE, ())
    return found


@dataclass
class _Causes:
    """Causes in the order of their first items, with the number of the first one that has a text, a
    subject or a sign: a report may have thousands of items and tensors, which are not compared one
    by one. named: by the first name in it, the names that an item of a cause is about."""

    report: Report
    causes: list[Cause] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    subjects: dict[str, int] = field(default_factory=dict)
    signs: dict[str, set[int]] = field(default_factory=dict)
    named: dict[str, dict[frozenset[str], int]] = field(default_factory=dict)

    def take(self, check: str, item: Item) -> None:
        """Add a failed item to the first cause that it follows from, or as one of its own."""
        is_static = check in _STATIC
        own = Cause(
            check=check,
            items=[(check, item)],
            words=[_words(item)],
            subjects=_subjects(self.report, item) if is_static else set(),
            signs=_signs(item) if is_static else set(),
            told={item.cause},
            parts={item.name.partition(":")[0]},
            said={*_said(item)} if is_static else set(),
        )
        explained = set(self._explained_by(own))
        number = min([*self._followed(item, own), *explained], default=len(self.causes))
        if number == len(self.causes):
            self.causes.append(own)
        else:
            self.causes[number].add(item, own, self.report, explains=number in explained)
        self._note(number, item, own)

    def _note(self, number: int, item: Item, own: Cause) -> None:
        """Note what an item says as that of a cause."""
        self.told[item.cause] = min(self.told.get(item.cause, number), number)
        for subject in own.subjects:
            self.subjects[subject] = min(self.subjects.get(subject, number), number)
        for sign in own.signs:
            self.signs.setdefault(sign, set()).add(number)
        if own.check in _STATIC:
            names = item.subjects
            by_names = self.named.setdefault(names[0], {})
            key = frozenset(names)
            by_names[key] = min(by_names.get(key, number), number)

    def _followed(self, item: Item, own: Cause) -> Iterator[int]:
        """Yield numbers of the causes that say the same as an item, or are about what it is
        about."""
        if item.cause in self.told and item.cause:
            yield self.told[item.cause]
        if own.signs:
            rarest = min((self.signs.get(sign, set()) for sign in own.signs), key=len)
            for number in rarest:
                cause = self.causes[number]
                if own.check == cause.check and own.signs <= cause.signs:
                    yield number
        if own.subjects:
            yield from self._about(item, own)
        elif own.check in _STATIC:  # that the model does not load says in words why
            yield from (number for name, number in self.subjects.items() if name in item.cause)

    def _about(self, item: Item, own: Cause) -> Iterator[int]:
        """Yield numbers of causes that are about any subject of an item, if all are known, or any
        shard; what an engine reads follows from a cause of its part that is about all of it."""
        shards = {subject for subject in own.subjects if subject.endswith(_SHARD)}
        shared = own.subjects if own.subjects <= self.subjects.keys() else shards
        if not item.data.get(ENGINE):
            yield from (self.subjects[name] for name in shared if name in self.subjects)
            return
        for number, cause in enumerate(self.causes):
            of_its_part = own.parts <= cause.parts
            if _are_among(own.subjects, cause.subjects) if of_its_part else shared & cause.subjects:
                yield number

    def _explained_by(self, own: Cause) -> Iterator[int]:
        """Yield numbers of causes that the weights alone tell, where a comparison with the source
        finds all tensors of one of their items changed."""
        if own.check != "weights":
            return
        for name in own.subjects & self.named.keys():
            for names, number in self.named[name].items():
                if self.causes[number].check == "ledger" and names <= own.subjects:
                    yield number


def repairs(report: Report) -> dict[str, str]:
    """Return the commands that mend the failures, each once, with the line above it: what it does,
    and what stands for the names in it."""
    titles, causes = {}, causes_of(report)
    commands = {command for cause in causes for command in cause.repairs}
    for item in (item for cause in causes for _, item in cause.items):
        if item.repair in commands:
            title = "To finish it" if UNFINISHED in item.data else "To repair"
            if (corrected := item.data.get(CORRECTED)) is not None:
                titles[item.repair] = f"{title}, in {corrected}:"
                continue
            names = unknown_words(item.repair)
            titles[item.repair] = f"{title} ({names}):" if names else f"{title}:"
    return titles


def named(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are."""
    if any(", " in name for name in names):
        return shortened(names, _MOST_NAMES, "; ")
    return ", ".join(names)


def _are_among(own: set[str], subjects: set[str]) -> bool:
    """True for tensors of the modules that others are of, perhaps by an engine's names for its
    layer."""
    modules = {other.rpartition(".")[0] for other in subjects}
    in_layers = {end for module in modules for end in _ends(module)}
    return all(
        any(one in in_layers for one in _beginnings(name.partition(_ENGINES_LAYER)[2]))
        if _ENGINES_LAYER in name
        else any(one in modules for one in _beginnings(name))
        for name in own
    )


def _beginnings(name: str) -> Iterator[str]:
    """Yield the modules that a tensor may be of: scales of some formats have longer names."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _ends(module: str) -> Iterator[str]:
    """Yield a module's name without its first components."""
    while "." in module:
        module = module.partition(".")[2]
        yield module


def _subjects(report: Report, item: Item) -> set[str]:
    """Return the tensors and files that an item is about; folders are none."""
    paths = {subject.removeprefix(f"{report.options.bundle}/") for subject in item.subjects}
    return {path for path in paths if "." in path.rpartition("/")[2]}


def _is_file(subject: str) -> bool:
    """True for a file without tensors."""
    return subject.endswith((".json", ".jinja", ".model", ".txt"))


def _words(item: Item) -> str:
    """Return what is wrong, with subject and figure where the cause does not say them; of tensors
    of which the same is said, the first alone is named."""
    if not item.cause:
        return f"{item.subject}: {item.measured}" if item.subject else item.measured
    words = "; ".join(_sentences(item)) or item.cause
    if here := item.data.get(NAMES_HERE):
        words += f" ({here})"
    if fused := item.data.get(FUSED_IN):
        words += f" (stored fused, in {shortened(fused, _MOST_NAMES)})"
    return words if _says(words, item.subject) else f"{item.subject}: {words}"


def _says(words: str, subject: str) -> bool:
    """Return whether words name a subject, or the layer or module that it is of."""
    parts = subject.split(".") if "/" not in subject else [subject]
    beginnings = (".".join(parts[:count]) for count in range(_LAYER_PARTS, len(parts)))
    return subject in words or any(one in words for one in beginnings)


def _sentences(item: Item) -> list[str]:
    """Return a sentence per sign of an item's problems with the other subjects behind it, and how
    many more there are; a problem that says the beginning of another's sentence is one of those."""
    problems = list(item.data.get("problems", ()))
    by_sign: dict[str, dict[str, str]] = {}
    for problem in problems:
        by_sign.setdefault(_sign(problem), {}).setdefault(problem["subject"], problem["words"])
    begun = {sign[: colon.start()] for sign in by_sign for colon in re.finditer(":", sign)}
    shown = [sign for sign in by_sign if sign not in begun]
    lines = []
    for sign in shown[:_MOST_SENTENCES]:
        problems_of = by_sign.pop(sign)
        told = _told(problems_of)
        lines += told
        if more := [_named_by(own, name) for name, own in problems_of.items() if own not in told]:
            lines.append(f"likewise {_alike(more)}")
    left = sum(map(len, by_sign.values()))
    return [*lines, f"and {left:,} more"] if left else lines


def _named_by(words: str, subject: str) -> str:
    """Return the tensor that words begin with, where it is of its module, as a scale; else the
    subject."""
    name = _NAME_OR_FIGURE.match(words)
    is_of_it = name is not None and name[0].startswith(f"{subject.rpartition('.')[0]}.")
    return name[0] if name is not None and is_of_it else subject


def _told(by_subject: Mapping[str, str]) -> list[str]:
    """Return the first of some sentences by their subjects, and those of the first few that several
    subjects share: they are of other layers or parts."""
    first = next(iter(by_subject.values()))
    shared = [words for words, count in Counter(by_subject.values()).items() if count > 1]
    return list(dict.fromkeys([first, *shared[:_MOST_NAMES]]))


def _alike(names: Sequence[str]) -> str:
    """Return the first of some tensors, those of experts by one name with the experts' numbers, and
    how many more there are."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(as_any_expert(name), []).append(name)
    shown = dict(islice(kinds.items(), _MOST_NAMES))
    words = ", ".join(as_experts(own) for own in shown.values())
    left = len(names) - sum(map(len, shown.values()))
    return f"{words} and {left:,} more" if left else words


def _likewise(report: Report, names: Sequence[str]) -> str:
    """Return what else an earlier item's words are true of."""
    return f"likewise {_alike([name.removeprefix(f'{report.options.bundle}/') for name in names])}"


def _signs(item: Item) -> set[str]:
    """Return what an item says, without the names and figures in it."""
    return {sign for _, sign in _said(item)}


def _said(item: Item) -> Iterator[tuple[str, str]]:
    """Yield what an item is about, and what it says of that without names and figures."""
    for problem in item.data.get("problems") or [{"subject": item.subject, "words": item.cause}]:
        yield problem["subject"], _sign(problem)


def _sign(problem: Mapping[str, str]) -> str:
    """Return a problem's words with a mark in the place of names and figures."""
    words, subject = problem["words"], problem["subject"]
    if subject and not _NAME_OR_FIGURE.fullmatch(subject):
        words = words.replace(subject, _MARK)
    return _NAME_OR_FIGURE.sub(_MARK, words)
