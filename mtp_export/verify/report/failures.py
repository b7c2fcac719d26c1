"""Failures of a report by their causes: what fails because of one thing is told once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_export.verify.check import ENGINE, KNOWS_MORE, Item, Status
from mtp_export.verify.report.report import Report

_STATIC = ("files", "ledger", "weights")  # checks whose subjects are tensors and files
_SHARD = ".safetensors"
_ENGINES_LAYER = "model.decoder."  # as an engine calls the draft's layer
_MOST_NAMES, _MOST_SENTENCES = 3, 5
_MARK = "§"
_NAME_OR_FIGURE = re.compile(r"[\w/*-]+(?:\.[\w*-]+)+|\b(?:main|mtp)/|\d[\d,.]*")


@dataclass
class Cause:
    """Failed items that have one cause.

    check: the one whose words tell it. items: those that fail, each behind its check's name.
    subjects: tensors and files at fault, files by their paths in the bundle. signs: what is said of
    them, without their names and figures.
    """

    check: str
    items: list[tuple[str, Item]]
    words: list[str]
    subjects: set[str]
    signs: set[str]

    @property
    def names(self) -> list[str]:
        """Names of the items, each behind its check's."""
        return [f"{check}, {item.name}" for check, item in self.items]

    @property
    def told(self) -> list[str]:
        """The items' own causes."""
        return [item.cause for _, item in self.items]

    @property
    def title(self) -> str:
        """Names of the first items, and how many more there are."""
        return named(self.names)

    @property
    def text(self) -> str:
        """Sentences on what is wrong, as one."""
        return "; ".join(self.words)

    @property
    def repairs(self) -> list[str]:
        """Commands that mend it, each once."""
        return list(dict.fromkeys(item.repair for _, item in self.items if item.repair))

    def add(self, item: Item, other: Cause, report: Report) -> None:
        """Add what fails for this cause too. The comparison with the source knows more of a tensor
        than checks without one, and of configs every check says something else."""
        is_new, says_the_same = item.cause not in self.told, other.signs <= self.signs
        explains = not other.subjects <= self.subjects and _explains(other, self)
        self.items += other.items
        self.subjects |= other.subjects
        self.signs |= other.signs
        if not is_new or ENGINE in item.data:
            return
        if says_the_same:
            self.words.append(_likewise(report, item))
        elif not other.subjects:
            return
        elif explains or any(_is_file(subject) for subject in other.subjects):
            self.words += other.words
        elif (self.check, other.check) == ("ledger", "weights") or KNOWS_MORE in item.data:
            self.check, self.words = other.check, other.words


def causes_of(report: Report) -> list[Cause]:
    """Return the causes of the failed items, in the order of the first of each."""
    causes: list[Cause] = []
    for result, item in report.items:
        if item.status is not Status.FAIL:
            continue
        is_static = result.name in _STATIC
        own = Cause(
            check=result.name,
            items=[(result.name, item)],
            words=[_words(item)],
            subjects=_subjects(report, item) if is_static else set(),
            signs=_signs(item) if is_static else set(),
        )
        at_fault = {subject for cause in causes for subject in cause.subjects}
        is_known = own.subjects <= at_fault
        known = next((c for c in causes if _follows(item, own, c, is_known=is_known)), None)
        if known is None:
            causes.append(own)
        else:
            known.add(item, own, report)
    return causes


def named(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    if any(", " in name for name in names) and more > 0:
        return f"{'; '.join(names[:_MOST_NAMES])}; and {more:,} more"
    separator = "; " if any(", " in name for name in names) else ", "
    return separator.join(names)


def _follows(item: Item, own: Cause, cause: Cause, *, is_known: bool) -> bool:
    """True for an item that says the same as others before, or fails for what they are about.
    is_known: other causes before are about all its subjects."""
    if item.cause and item.cause in cause.told:
        return True
    if own.signs and own.check == cause.check and own.signs <= cause.signs:
        return True
    if not own.subjects:  # that the model does not load says in words why
        return own.check in _STATIC and any(subject in item.cause for subject in cause.subjects)
    if item.data.get(ENGINE) and _parts(own) <= _parts(cause):
        return all(_is_among(subject, cause.subjects) for subject in own.subjects)
    if _explains(own, cause):
        return True
    shards = {subject for subject in own.subjects if subject.endswith(_SHARD)}
    return bool((own.subjects if is_known else shards) & cause.subjects)


def _explains(own: Cause, cause: Cause) -> bool:
    """True for a comparison with the source that finds all tensors of an earlier item changed."""
    if (cause.check, own.check) != ("ledger", "weights"):
        return False
    return any({*_named_in(item)} <= own.subjects for _, item in cause.items)


def _parts(cause: Cause) -> set[str]:
    """Return the parts that the items of a cause are about, or their names."""
    return {item.name.partition(":")[0] for _, item in cause.items}


def _is_among(subject: str, subjects: set[str]) -> bool:
    """True for a tensor that is one of others, perhaps by an engine's name for its layer."""
    if not subject.startswith(_ENGINES_LAYER):
        return subject in subjects
    return any(other.endswith(f".{subject.removeprefix(_ENGINES_LAYER)}") for other in subjects)


def _subjects(report: Report, item: Item) -> set[str]:
    """Return the tensors and files that an item is about; folders are none."""
    paths = {subject.removeprefix(f"{report.options.bundle}/") for subject in _named_in(item)}
    return {path for path in paths if "." in path.rpartition("/")[2]}


def _named_in(item: Item) -> Sequence[str]:
    """Return the subjects of an item's problems, or its own."""
    return [problem["subject"] for problem in item.data.get("problems", ())] or [item.subject]


def _is_file(subject: str) -> bool:
    """True for a file without tensors."""
    return subject.endswith((".json", ".jinja", ".model", ".txt"))


def _words(item: Item) -> str:
    """Return what is wrong, with subject and figure where the cause does not say them; of tensors
    of which the same is said, the first alone is named."""
    if not item.cause:
        return f"{item.subject}: {item.measured}" if item.subject else item.measured
    words = "; ".join(_sentences(item)) or item.cause
    return words if item.subject in words else f"{item.subject}: {words}"


def _sentences(item: Item) -> list[str]:
    """Return a sentence per sign of an item's problems with the other subjects behind it, and how
    many more there are; a problem that says the beginning of another's sentence is one of those."""
    problems = list(item.data.get("problems", ()))
    by_sign: dict[str, list[dict[str, str]]] = {}
    for problem in problems:
        by_sign.setdefault(_sign(problem), []).append(problem)
    begun = {sign[: colon.start()] for sign in by_sign for colon in re.finditer(":", sign)}
    shown = [sign for sign in by_sign if sign not in begun]
    lines, left = [], len(problems)
    for sign in shown[:_MOST_SENTENCES]:
        first, *others = by_sign[sign]
        names = [problem["subject"] for problem in others[: _MOST_NAMES - 1]]
        lines.append(first["words"])
        if names:
            lines.append(f"likewise {', '.join(names)}")
        left -= 1 + len(names)
    return [*lines, f"and {left:,} more"] if left else lines


def _likewise(report: Report, item: Item) -> str:
    """Return what else an earlier item's words are true of."""
    problems = item.data.get("problems", ())
    more = f" and {len(problems) - 1:,} more" if len(problems) > 1 else ""
    return f"likewise {item.subject.removeprefix(f'{report.options.bundle}/')}{more}"


def _signs(item: Item) -> set[str]:
    """Return what an item says, without the names and figures in it."""
    problems = item.data.get("problems") or [{"subject": item.subject, "words": item.cause}]
    return {_sign(problem) for problem in problems}


def _sign(problem: Mapping[str, str]) -> str:
    """Return a problem's words with a mark in the place of names and figures."""
    words = problem["words"]
    if problem["subject"]:
        words = words.replace(problem["subject"], _MARK)
    return _NAME_OR_FIGURE.sub(_MARK, words)
