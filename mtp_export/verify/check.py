"""A check and what it finds: items that pass, fail or were not tested, with figure and bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_export.verify.context import Context


class Status(StrEnum):
    """How an item ended."""

    PASS = "pass"
    FAIL = "fail"
    NOT_TESTED = "not tested"


WHOLE_CHECK = "all of it"  # the item of a check that was not run at all


class Level(IntEnum):
    """How deep to verify; a level includes those before it."""

    FILES = 1
    WEIGHTS = 2
    RUN = 3


@dataclass(frozen=True)
class Item:
    """One thing that was looked at.

    figure is what was measured and bound what it was held against, both as shown to people.
    subject names the tensor, file or prompt that a failure is about. cause says in words what is
    likely wrong (on a failure) or why nothing was tested. data is for machines and plots: numbers,
    strings, lists and dicts alone.
    """

    name: str
    status: Status
    figure: str = ""
    bound: str = ""
    subject: str = ""
    cause: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A group of items, run together; `run` yields them as they are known.

    whole_model: it holds the model in memory, which not every machine can.
    """

    title: str
    level: Level
    run: Callable[[Context], Iterator[Item]]
    whole_model: bool = True


@dataclass(frozen=True)
class CheckResult:
    """What a check found, in order, and how long it took."""

    name: str
    title: str
    items: tuple[Item, ...]
    seconds: float

    @property
    def status(self) -> Status:
        """Fail if anything failed, pass if anything passed, else not tested."""
        statuses = {item.status for item in self.items}
        for status in (Status.FAIL, Status.PASS):
            if status in statuses:
                return status
        return Status.NOT_TESTED


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: with which tensor or file, and a sentence that names it."""

    subject: str
    words: str


_NAMED_PROBLEMS = 5


def verdict(name: str, problems: Sequence[Problem], figure: str = "", bound: str = "") -> Item:
    """An item that passes without problems, else names the first few; data lists them all."""
    if not problems:
        return Item(name, Status.PASS, figure, bound)
    words = "; ".join(problem.words for problem in problems[:_NAMED_PROBLEMS])
    more = len(problems) - _NAMED_PROBLEMS
    return Item(
        name,
        Status.FAIL,
        f"{len(problems):,} wrong" + (f" of {figure}" if figure else ""),
        bound,
        problems[0].subject,
        words + (f"; and {more:,} more" if more > 0 else ""),
        {"problems": [{"subject": p.subject, "words": p.words} for p in problems]},
    )
