"""Proof that an export decodes as its source does: ten checks, one module each.

A check above the level that was asked for, or that cannot run, says so: nothing is skipped in
silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module

from mtp_export.errors import MtpExportError, ResourceError, UnsupportedError, UsageError
from mtp_export.schemes.transforms import one_torch_thread
from mtp_export.verify.check import WHOLE_CHECK, Check, CheckResult, Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.files import files_check as files

_LEAST_HIDDEN_FOR_THREADS = 1024


def _module(name: str) -> Callable[[Context], Iterator[Item]]:
    """`run` of a module that is imported when its check starts: level files needs no torch."""

    def run(context: Context) -> Iterator[Item]:
        module = import_module(f"mtp_export.verify.{name}")
        yield from module.run(context)

    return run


# In the order of a report. A new check is one file and one line here.
CHECKS: dict[str, Check] = {
    "files": Check("Files", Level.FILES, files.run),
    "ledger": Check("Load ledger", Level.WEIGHTS, _module("weights.ledger")),
    "weights": Check("Weights against source", Level.WEIGHTS, _module("weights.against_source")),
    "greedy": Check("Greedy equality", Level.RUN, _module("decoding.greedy")),
    "sampling": Check("Sampling", Level.RUN, _module("decoding.sampling")),
    "acceptance": Check("Acceptance", Level.RUN, _module("decoding.acceptance")),
    "differential": Check("Differential", Level.RUN, _module("decoding.differential")),
    "controls": Check("Negative controls", Level.RUN, _module("decoding.controls")),
    "paths": Check("Path equivalence", Level.RUN, _module("decoding.paths")),
    "speed": Check("Speed", Level.RUN, _module("decoding.speed")),
    "stream": Check("Streamed pass", Level.RUN, _module("decoding.stream"), whole_model=False),
}


def run_checks(context: Context) -> Iterator[CheckResult]:
    """Every check of CHECKS, one after the other, as they finish."""
    for name, check in CHECKS.items():
        yield check_result(name, check, context)


def check_result(name: str, check: Check, context: Context) -> CheckResult:
    """One check, whatever it comes to."""
    start = time.monotonic()
    items = tuple(_items(check, context))
    return CheckResult(name, check.title, items, time.monotonic() - start)


def _items(check: Check, context: Context) -> Iterator[Item]:
    """A check's items. A failure that it raises is one item more, the last."""
    if check.level > context.options.level:
        asked = context.options.level.name.lower()
        yield _not_tested(f"--level {asked} leaves it out")
        return
    if check.level is Level.RUN:
        reason = context.why_not_run if check.whole_model else context.why_not_opened
        if reason is not None:
            yield _not_tested(reason)
            return
    try:
        with one_torch_thread() if _small(check, context) else nullcontext():
            yield from check.run(context)
    except UsageError:
        raise
    except (UnsupportedError, ResourceError) as error:
        yield _not_tested(str(error))
    except MtpExportError as error:
        yield Item("could be checked to the end", Status.FAIL, cause=str(error))


def _small(check: Check, context: Context) -> bool:
    """Whether a check multiplies, and so small matrices that a second thread only costs time."""
    main = context.main
    if main is None or check.level is Level.FILES:
        return False
    return int(main.config.get("hidden_size", 0)) < _LEAST_HIDDEN_FOR_THREADS


def _not_tested(reason: str) -> Item:
    return Item(WHOLE_CHECK, Status.NOT_TESTED, cause=reason)
