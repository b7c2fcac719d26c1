"""The verdict of a report in words: a line for people, and the error that a command ends with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mtp_checkpoints.errors import VerificationError
from mtp_checkpoints.layouts import engine_of
from mtp_export.progress import counted, shortened
from mtp_export.verify.check import CORRECTED, LEFT_OUT, Item, Status, unknown_words
from mtp_export.verify.report.failures import MOST_CAUSES, Cause, causes_of, repairs
from mtp_export.verify.report.report import BUNDLE, Report

_NAMED_ITEMS = 3
_SHOWN_CHARACTERS = 800  # of a cause
_OF_FILES = "no fault in headers and configs"
_OF_WEIGHTS = {"files", "ledger", "weights"}  # checks that decode nothing


def verdict_line(report: Report) -> str:
    """The verdict with what was verified, and how deep: a level that was not run is not passed."""
    left_out = sum(result.status is Status.NOT_TESTED for result in report.results)
    engine = report.options.engine_for(report.facts["options"])
    alone = f" for {_titles([engine])}" if engine else ""
    depth = {
        Status.PASS: _sound(report) + alone,
        Status.FAIL: f"FAILED{alone}{_for_engines(report)}{_for_one_alone(report)}",
        Status.NOT_TESTED: "nothing was tested",
    }[report.status]
    line = f"Verification of {report.options.bundle}: {depth}"
    if report.status is Status.PASS and left_out:
        line += f"; {left_out} of {len(report.results)} checks not run"
    return line


def verdict_words(report: Report) -> str:
    """The verdict in one line, with the counts of items."""
    counts = ", ".join(f"{report.count(status)} {status}" for status in Status)
    files_alone = _sound(report) == _OF_FILES
    verdict = {
        Status.PASS: _OF_FILES.capitalize() if files_alone else "Verified",
        Status.FAIL: "NOT verified",
        Status.NOT_TESTED: "Nothing was tested",
    }[report.status]
    return f"{verdict}: {counts}, in {report.seconds:.1f} s."


def raise_if_failed(report: Report, *, told: bool = False) -> None:
    """Raise VerificationError if an item failed: with the item, or the causes of several, and the
    commands that mend them. told: with the number of items alone, since the page was printed."""
    failed = [(result.name, item) for result, item in report.items if item.status is Status.FAIL]
    if not failed:
        return
    what = f"Verification failed in {len(failed)} of {sum(1 for _ in report.items)} items"
    ship = f"Do not ship this {report.facts['kind']}{_for_engines(report)}"
    one_alone = _for_one_alone(report)
    if told:
        error = VerificationError(what, todo=ship + one_alone if one_alone else "Do not ship it")
    elif len(failed) == 1:
        ((check, item),) = failed
        if (corrected := item.data.get(CORRECTED)) is not None:
            run = f"in {corrected}: {item.repair}"
        else:
            names = unknown_words(item.repair)
            run = f"run {item.repair}" + (f" ({names})" if names else "")
        error = VerificationError(
            what,
            where=report.options.bundle,
            found=f"{check}: {_failure(item)}",
            todo=f"{ship}; {run if item.repair else _usual(report)}{one_alone}",
        )
    else:
        error = _error_of_several(report, what, ship)
    for _, item in failed:  # of internal errors, for --debug
        if "traceback" in item.data:
            error.add_note(item.data["traceback"])
    raise error


def raise_if_not_tested(report: Report) -> None:
    """Raise VerificationError naming the items that were not tested, but for checks that the
    options leave out."""
    left = [
        f"{result.name}: {item.name}: {item.cause}"
        for result, item in report.items
        if item.status is Status.NOT_TESTED and LEFT_OUT not in item.data
    ]
    if left:
        raise VerificationError(
            f"Not everything was tested: {len(left)} of {sum(1 for _ in report.items)} items",
            where=report.options.bundle,
            expected="no item that is not tested, with --strict",
            found=shortened(left, _NAMED_ITEMS, "; "),
            todo="Give what they lack, or leave out --strict",
        )


def _error_of_several(report: Report, what: str, ship: str) -> VerificationError:
    """Return the error of several failed items, with a line for each of the first causes."""
    causes = causes_of(report)
    mended = any(cause.repairs for cause in causes)
    error = VerificationError(
        what,
        where=report.options.bundle,
        found=counted(len(causes), "cause"),
        todo=(ship if mended else f"{ship}; {_usual(report)}") + _for_one_alone(report),
    )
    error.add_lines([*_lines_of(causes, repairs(report))])
    return error


def _lines_of(causes: Sequence[Cause], titles: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each of the first causes, and the command that mends it below the last of
    those in a row that it mends. titles: the lines above the commands."""
    shown = causes[:MOST_CAUSES]
    commands = [next(iter(cause.repairs), "") for cause in shown]
    for number, (cause, command) in enumerate(zip(shown, commands, strict=True), start=1):
        yield f"- {_clipped(_told(cause))}"
        if command and command not in commands[number : number + 1]:
            yield titles[command]
            yield f"  {command}"
    if (more := len(causes) - len(shown)) > 0:
        yield f"and {counted(more, 'more cause')}: --html FILE.html shows each"


def _told(cause: Cause) -> str:
    """Return what failed and why; of one item with its figures."""
    if len(cause.items) > 1:
        return f"{cause.title}: {cause.text}"
    ((check, item),) = cause.items
    return f"{check}: {_failure(item)}"


def _usual(report: Report) -> str:
    """Return what to do where no command mends a failure."""
    is_bundle = report.facts["kind"] == BUNDLE
    return "export it again from a checked source" if is_bundle else "look into the report"


def _failure(item: Item) -> str:
    parts = [item.name]
    if item.subject:
        parts.append(f"({item.subject})")
    if item.figure:
        parts.append(item.figure + (f" against {item.bound}" if item.bound else ""))
    text = " ".join(parts)
    return f"{text}: {item.cause.rstrip('.')}" if item.cause else text


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} […]"


def _for_engines(report: Report) -> str:
    """Return the engines that a failure is for, where they differ."""
    sound = report.sound_for
    return f" for {_titles(one for one in report.engines if one not in sound)}" if sound else ""


def _for_one_alone(report: Report) -> str:
    """Return the last sentence of a verdict where engines differ: the options that judge it for one
    which reads it as it is, and what that gives."""
    sound = report.sound_for
    if not sound:
        return ""
    options = " or ".join(f"--engine {name}" for name in sound)
    return f". {options} judges it for {_titles(sound, 'or')} alone: {_sound(report)}"


def _titles(names: Iterable[str], joined: str = "and") -> str:
    return f" {joined} ".join(engine_of(name).title for name in names)


def _sound(report: Report) -> str:
    """Words for what passes where nothing fails, by the deepest check that ran."""
    ran = {one.name for one in report.results if one.status is not Status.NOT_TESTED}
    if ran <= {"files"}:
        return _OF_FILES
    return "no fault in files and weights" if ran <= _OF_WEIGHTS else "passed"
