"""Failures of a report by their causes: what fails because of one thing is told once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_export.verify.check import ENGINE, KNOWS_MORE, Item, Status
from mtp_export.verify.report.report import Report

_STATIC = ("files", "ledger", "weights")  # checks whose subjects are tensors and files
_SHARD = ".safetensors"
_ENGINES_LAYER = "model.decoder."  # as an engine calls the draft's layer
_MOST_NAMES = 3


@dataclass
class Cause:
    """Failed items that have one cause.

    check: the one whose words tell it. items: those that fail, each behind its check's name.
    subjects: tensors and files at fault, files by their paths in the bundle.
    """

    check: str
    items: list[tuple[str, Item]]
    words: list[str]
    subjects: set[str]

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
        """What is wrong, in one sentence."""
        return "; ".join(self.words)

    @property
    def repairs(self) -> list[str]:
        """Commands that mend it, each once."""
        return list(dict.fromkeys(item.repair for _, item in self.items if item.repair))

    def add(self, item: Item, other: Cause) -> None:
        """Add what fails for this cause too. The comparison with the source knows more of a tensor
        than checks without one, and of configs every check says something else."""
        is_new = item.cause not in self.told
        self.items += other.items
        self.subjects |= other.subjects
        if not is_new or ENGINE in item.data or not other.subjects:
            return
        if any(_is_file(subject) for subject in other.subjects):
            self.words += other.words
        elif (self.check, other.check) == ("ledger", "weights") or KNOWS_MORE in item.data:
            self.check, self.words = other.check, other.words


def causes_of(report: Report) -> list[Cause]:
    """Return the causes of the failed items, in the order of the first of each."""
    causes: list[Cause] = []
    for result, item in report.items:
        if item.status is not Status.FAIL:
            continue
        own = Cause(
            check=result.name,
            items=[(result.name, item)],
            words=[_words(item)],
            subjects=_subjects(report, item) if result.name in _STATIC else set(),
        )
        at_fault = {subject for cause in causes for subject in cause.subjects}
        is_known = own.subjects <= at_fault
        known = next((c for c in causes if _follows(item, own, c, is_known=is_known)), None)
        if known is None:
            causes.append(own)
        else:
            known.add(item, own)
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
    if not own.subjects:  # that the model does not load says in words why
        return own.check in _STATIC and any(subject in item.cause for subject in cause.subjects)
    if item.data.get(ENGINE) and _part(own) == _part(cause):
        return all(_is_among(subject, cause.subjects) for subject in own.subjects)
    shards = {subject for subject in own.subjects if subject.endswith(_SHARD)}
    return bool((own.subjects if is_known else shards) & cause.subjects)


def _part(cause: Cause) -> str:
    """Return the part that the first item of a cause is about, or its name."""
    return cause.names[0].partition(", ")[2].partition(":")[0]


def _is_among(subject: str, subjects: set[str]) -> bool:
    """True for a tensor that is one of others, perhaps by an engine's name for its layer."""
    if not subject.startswith(_ENGINES_LAYER):
        return subject in subjects
    return any(other.endswith(f".{subject.removeprefix(_ENGINES_LAYER)}") for other in subjects)


def _subjects(report: Report, item: Item) -> set[str]:
    """Return the tensors and files that an item is about; folders are none."""
    told = {problem["subject"] for problem in item.data.get("problems", ())} or {item.subject}
    paths = {subject.removeprefix(f"{report.options.bundle}/") for subject in told}
    return {path for path in paths if "." in path.rpartition("/")[2]}


def _is_file(subject: str) -> bool:
    """True for a file without tensors."""
    return subject.endswith((".json", ".jinja", ".model", ".txt"))


def _words(item: Item) -> str:
    """Return what is wrong, with subject and figure where the cause does not say them."""
    subject = f"{item.subject}: " if item.subject and item.subject not in item.cause else ""
    return f"{subject}{item.cause}" if item.cause else f"{subject}{item.measured}"
