"""Checks and the items that they yield: each passes, fails or was not tested, with its figure and
bound."""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from traceback import format_exception
from typing import Any, TypedDict, Unpack

from mtp_checkpoints.errors import IoError, MtpExportError, ResourceError, UnsupportedError
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.files import read_failure
from mtp_export.progress import counted, shortened

WHOLE_CHECK = "all of it"  # the item of a check that did not run at all
MTP_MODULE = "the MTP module"  # the subject of a failure that is no single tensor's
LEFT_OUT = "left_out"  # in the data of what the options leave out
TO_ADD = "to_add"  # in the data of a failure: what lists of quantization_config lack
TO_TAKE = "to_take"  # the entries that are too many in them
CORRECTED = "corrected"  # the place in a config where the repair is written: all that is wrong
LISTS = "lists"  # what is written there, whole
UNFINISHED = "unfinished"  # in the data of a bundle whose run has not ended: its repair goes on
KNOWS_MORE = "knows_more"  # in the data of a failure whose words replace an earlier check's
EQUAL = "equal_causes"  # in the data of a failure: how many causes explain it equally
GAIN = "gain"  # in the data of a failure: nats per token that what it names gains on plain text
UNDONE = "undone"  # in the data of a failure: changes that were undone, with their gains
NAMES_HERE = "names_here"  # in the data of a failure: words for DeepSeek's names in its cause
FUSED_IN = "fused_in"  # in the data of a failure of experts: the tensors that hold them
ENGINE = "engine"  # in the data of how one engine, by its name, reads the draft
_REPORTED = "reported"  # the bound of a figure that nothing is required of
_NAMED_PROBLEMS = 5
_SHOWN_CHARACTERS = 1000  # of a problem or an internal error: names and values may be any size


class Status(StrEnum):
    """The outcome of an item."""

    PASS = "pass"
    FAIL = "fail"
    NOT_TESTED = "not tested"


class Unknown(StrEnum):
    """Words of a repair that its user replaces."""

    SOURCE = "SOURCE"
    MAIN = "MAIN"
    ORIGINAL = "ORIGINAL"
    BUNDLE = "BUNDLE"


_MEANINGS = {
    Unknown.SOURCE: "the checkpoint that it was made from",
    Unknown.MAIN: "the checkpoint of its main model",
    Unknown.ORIGINAL: "the checkpoint that this one was made from",
    Unknown.BUNDLE: "a new folder",
}


def unknown_words(command: str) -> str:
    """Return what stands for the words of a repair that its user replaces; "" without any."""
    words = shlex.split(command)
    return "; ".join(f"{word}: {meaning}" for word, meaning in _MEANINGS.items() if word in words)


class Level(IntEnum):
    """The depth of a verification; a level includes those before it."""

    FILES = 1
    WEIGHTS = 2
    RUN = 3


@dataclass(frozen=True)
class Check:
    """A group of items that run together.

    places are modules relative to mtp_export.verify, of which run(context) yields items as they are
    known, or "module:function" for another function. An exception ends the items of its place
    alone. A module is imported when it starts, so that level files needs no torch. whole_model: the
    check holds the model in memory, which not every machine can. remote_places are those that the
    bytes of a remote MTP module suffice for.
    """

    title: str
    level: Level
    places: tuple[str, ...]
    whole_model: bool = True
    remote_places: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Item:
    """One property of a bundle, and whether it holds.

    figure is what was measured and bound what it was compared with, both as shown to people.
    subject names the tensor, file or prompt that a failure is about. cause says in words what is
    likely wrong (on a failure) or why nothing was tested. repair is a command that mends a failure,
    or the fields of a config that do, where one does. data is for machines and plots: numbers,
    strings, lists and dicts alone.
    """

    name: str
    status: Status
    figure: str = ""
    bound: str = ""
    subject: str = ""
    cause: str = ""
    repair: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def subjects(self) -> list[str]:
        """All that a failure is about."""
        listed = self.data.get("problems")
        return [one["subject"] for one in listed] if listed else [self.subject]

    @property
    def measured(self) -> str:
        """The figure with its bound, in one line."""
        return f"{self.figure} (bound: {self.bound})" if self.bound else self.figure


class Shown(TypedDict, total=False):
    """Fields of an Item that every outcome may have."""

    figure: str
    bound: str
    subject: str
    repair: str
    data: Mapping[str, Any]


def passed(name: str, **shown: Unpack[Shown]) -> Item:
    """An item that passes."""
    return Item(name=name, status=Status.PASS, **shown)


def failed(name: str, cause: str, **shown: Unpack[Shown]) -> Item:
    """An item that fails, and what is likely wrong."""
    return Item(name=name, status=Status.FAIL, cause=cause, **shown)


def not_tested(name: str, reason: str, **shown: Unpack[Shown]) -> Item:
    """An item that could not be decided, and why."""
    return Item(name=name, status=Status.NOT_TESTED, cause=reason, **shown)


def judged(name: str, holds: bool, cause: str, **shown: Unpack[Shown]) -> Item:
    """An item that passes if it holds, and else fails for the cause."""
    return passed(name, **shown) if holds else failed(name, cause, **shown)


def measured(name: str, figure: str, data: Mapping[str, Any]) -> Item:
    """A figure that is reported and has no bound."""
    return passed(name, figure=figure, bound=_REPORTED, data=data)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the tensor or file, and a sentence that names it."""

    subject: str
    words: str


def verdict(name: str, problems: Sequence[Problem], figure: str = "", bound: str = "") -> Item:
    """An item that passes without problems, and else names the first few; data lists them all."""
    if not problems:
        return passed(name, figure=figure, bound=bound)
    problems = [Problem(_clipped(problem.subject), _clipped(problem.words)) for problem in problems]
    return failed(
        name,
        shortened([*dict.fromkeys(one.words for one in problems)], _NAMED_PROBLEMS, "; "),
        figure=_figure(len(problems), figure),
        bound=bound,
        subject=problems[0].subject,
        data={"problems": [{"subject": p.subject, "words": p.words} for p in problems]},
    )


def _figure(problems: int, figure: str) -> str:
    """Return the figure of an item with problems: those that are missing are none of the many."""
    there = figure.partition(" ")[0].replace(",", "")
    if there.isdecimal() and int(there) < problems:
        return f"{counted(problems, 'problem')}, {figure}"
    return f"{problems:,} wrong" + (f" of {figure}" if figure else "")


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} […]"


def ended_by(error: Exception, bundle: Place) -> Item:
    """The item of an exception that ended a module of a check.

    Whatever neither the bundle nor the machine explains is an internal error; data holds its
    traceback. Raises what raise_trouble raises: trouble of the machine is no verdict on a bundle.
    """
    raise_trouble(error, bundle)
    if isinstance(error, UnsupportedError | ResourceError) or _is_out_of_memory(error):
        return not_tested(WHOLE_CHECK, str(error) or "out of memory")
    if isinstance(error, OSError):
        error = read_failure(Path(error.filename), error)
    if isinstance(error, MtpExportError):
        return failed("could be checked to the end", str(error))
    return failed(
        f"internal: {type(error).__name__}",
        f"mtp-export itself failed here: {_clipped(repr(error))}. Please report this internal"
        " error, with the output of --debug",
        data={"traceback": "".join(format_exception(error))},
    )


# What an OSError about a file of the bundle says of the bundle: it is not there, or no file.
_OF_THE_BUNDLE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO),
)


def raise_trouble(error: Exception, bundle: Place) -> None:
    """Raise the IoError of a failed read, write or connection, unless it tells of the bundle.

    A disk that is full or fails, a file that may not be read, or a folder of this run that
    vanished, says nothing of a bundle: its verification then ends without a verdict.
    """
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        raise IoError("This machine starts no more threads", found=error) from error
    if not isinstance(error, OSError | IoError):
        return
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    path = error.where if isinstance(error, IoError) else error.filename
    of_bundle = cause is not None and cause.errno in _OF_THE_BUNDLE
    if of_bundle and isinstance(path, str | Path) and _is_in(Path(path), bundle):
        return
    if isinstance(error, IoError):
        raise error
    raise read_failure(Path(error.filename or str(bundle)), error) from error


def _is_in(path: Path, folder: Place) -> bool:
    return isinstance(folder, Path) and path.absolute().is_relative_to(folder.absolute())


def _is_out_of_memory(error: Exception) -> bool:
    """True for torch's errors too, which are none of MemoryError."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or torch is None:
        return isinstance(error, MemoryError)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@dataclass(frozen=True)
class CheckResult:
    """The items of a finished check, in order, and its duration."""

    name: str
    title: str
    items: tuple[Item, ...]
    seconds: float

    @property
    def status(self) -> Status:
        """Fail if any item failed, pass if any passed, else not tested."""
        return overall(item.status for item in self.items)


def overall(statuses: Iterable[Status]) -> Status:
    """The status of a group: fail if any failed, pass if any passed, else not tested."""
    found = set(statuses)
    for status in (Status.FAIL, Status.PASS):
        if status in found:
            return status
    return Status.NOT_TESTED
