"""Proof that an export decodes as its source does, check by check.

A check above the requested level, or one that cannot run, says so: nothing is skipped in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module

from mtp_export.errors import MtpExportError, ResourceError, UnsupportedError, UsageError
from mtp_export.schemes.transforms import one_torch_thread
from mtp_export.verify.check import (
    WHOLE_CHECK,
    Check,
    CheckResult,
    Item,
    Level,
    failed,
    not_tested,
)
from mtp_export.verify.context import Context

_LEAST_HIDDEN_FOR_THREADS = 1024

# In the order of a report. A new check is one file and one line here.
CHECKS: dict[str, Check] = {
    "files": Check("Files", Level.FILES, "files"),
    "ledger": Check("Load ledger", Level.WEIGHTS, "weights.ledger"),
    "weights": Check("Weights against source", Level.WEIGHTS, "weights.comparison"),
    "greedy": Check("Greedy equality", Level.RUN, "decoding.greedy"),
    "sampling": Check("Sampling", Level.RUN, "decoding.sampling"),
    "acceptance": Check("Acceptance", Level.RUN, "decoding.acceptance"),
    "differential": Check("Differential", Level.RUN, "decoding.differential"),
    "controls": Check("Negative controls", Level.RUN, "decoding.controls"),
    "paths": Check("Path equivalence", Level.RUN, "decoding.paths"),
    "speed": Check("Speed", Level.RUN, "decoding.speed"),
    "stream": Check("Streamed pass", Level.RUN, "decoding.stream", whole_model=False),
}


def run_checks(context: Context) -> Iterator[CheckResult]:
    """The results of all CHECKS, one after the other, as they finish."""
    for name, check in CHECKS.items():
        yield check_result(name, check, context)


def check_result(name: str, check: Check, context: Context) -> CheckResult:
    """The result of one check. A failure that it raises becomes an item."""
    start = time.monotonic()
    items = tuple(_items(check, context))
    return CheckResult(name=name, title=check.title, items=items, seconds=time.monotonic() - start)


def _items(check: Check, context: Context) -> Iterator[Item]:
    """A check's items. A failure that it raises is the last of them."""
    if check.level > context.options.level:
        requested = context.options.level.name.lower()
        yield not_tested(WHOLE_CHECK, f"--level {requested} leaves it out")
        return
    if check.level is Level.RUN:
        reason = context.why_not_run if check.whole_model else context.why_not_opened
        if reason is not None:
            yield not_tested(WHOLE_CHECK, reason)
            return
    module = import_module(f"{__name__}.{check.module}")
    run: Callable[[Context], Iterator[Item]] = module.run
    try:
        with one_torch_thread() if _multiplies_small(check, context) else nullcontext():
            yield from run(context)
    except UsageError:
        raise
    except (UnsupportedError, ResourceError) as error:
        yield not_tested(WHOLE_CHECK, str(error))
    except MtpExportError as error:
        yield failed("could be checked to the end", str(error))


def _multiplies_small(check: Check, context: Context) -> bool:
    """True if a check multiplies matrices so small that a second thread only costs time."""
    main = context.main
    if main is None or check.level is Level.FILES:
        return False
    return int(main.config.get("hidden_size", 0)) < _LEAST_HIDDEN_FOR_THREADS
