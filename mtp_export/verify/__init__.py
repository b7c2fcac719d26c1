"""Proof that an export decodes as its source does, check by check.

A check above the requested level, or one that cannot run, says so: nothing is skipped in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from mtp_checkpoints.families.signs import text_fields
from mtp_checkpoints.sources.byte_source import Place
from mtp_export.verify.check import (
    LEFT_OUT,
    WHOLE_CHECK,
    Check,
    CheckResult,
    Item,
    Level,
    Status,
    ended_by,
    not_tested,
)
from mtp_kernels.cpu.torch_threads import torch_threads_for

if TYPE_CHECKING:
    from mtp_export.verify.context import Context

_OF_VALUES = (
    *("weights.value_checks", "weights.own_scales", "weights.zero_points", "weights.word_order"),
    *("weights.channel_groups", "weights.joined_numbers", "weights.mtp_halves"),
    "weights.mtp_values",
    *("weights.shifted_norms", "weights.lost_bits"),
    *("weights.unnamed_values", "weights.cut_off", "weights.repeated_parts"),
    *("weights.neurons", "weights.norm_places"),
    *("weights.query_and_key_norms", "weights.scaled_runs"),
    *("weights.norm_sizes", "weights.sizes:far_from_like"),
)
# In the order of a report. A new check is one file and one line here.
CHECKS: dict[str, Check] = {
    "files": Check(
        "Files",
        Level.FILES,
        (
            *("files.checksums:opened", "files.presence", "files.checksums"),
            *("files.config_match", "files.quark_exclude", "files.released_values"),
            *("files.identity", "files.pairing", "files.gguf_keys"),
        ),
    ),
    "ledger": Check(
        "Load ledger",
        Level.WEIGHTS,
        (
            "files.checksums:repeated_values",
            *("weights.load_report", "weights.load_report:extra_drafts"),
            *_OF_VALUES,
        ),
        remote_places=_OF_VALUES,
    ),
    "weights": Check(
        "Weights against source", Level.WEIGHTS, ("weights.comparison", "weights.carried")
    ),
    "greedy": Check("Greedy equality", Level.RUN, ("decoding.greedy",)),
    "sampling": Check("Sampling", Level.RUN, ("decoding.sampling",)),
    "likelihood": Check("Plain text", Level.RUN, ("decoding.likelihood",)),
    "acceptance": Check(
        "Acceptance",
        Level.RUN,
        ("decoding.acceptance", "decoding.acceptance:extra_drafts", "decoding.rounding"),
    ),
    "differential": Check("Differential", Level.RUN, ("decoding.differential",)),
    "controls": Check("Negative controls", Level.RUN, ("decoding.controls",)),
    "paths": Check("Path equivalence", Level.RUN, ("decoding.paths",)),
    "speed": Check("Speed", Level.RUN, ("decoding.speed",)),
    "stream": Check("Streamed run", Level.RUN, ("decoding.stream",), whole_model=False),
}


def run_checks(context: Context) -> Iterator[CheckResult]:
    """The results of all CHECKS, one after the other, as they finish.

    Raises IoError where this machine cannot read or write: that is no verdict on a bundle.
    """
    for name, check in CHECKS.items():
        result = check_result(name, check, context)
        context.note_failures(name, result.items)
        yield result


def check_result(name: str, check: Check, context: Context) -> CheckResult:
    """The result of one check. An exception becomes an item; only what it ended is left out."""
    from mtp_export.verify.files.repair import with_repair  # help and errors need none of it

    start = time.monotonic()
    bundle = context.options.bundle
    items = _collected(_left_out(check, context), bundle)
    if not items:
        with torch_threads_for(_hidden_size(check, context)):
            for place in check.places if context.is_local else check.remote_places or check.places:
                items += _collected(_items(place, context), bundle)
                context.note_failures(name, items)
    of_bytes = check.level < Level.RUN  # what decoding shows, the same export would show again
    items = [with_repair(context, item, remake=of_bytes) for item in items]
    if any(item.status is Status.FAIL for item in items):
        items = _with_names_here(check, items, context)
    seconds = time.monotonic() - start
    return CheckResult(name=name, title=check.title, items=tuple(items), seconds=seconds)


def _with_names_here(check: Check, items: Iterable[Item], context: Context) -> list[Item]:
    """Items with the names that the checkpoint has for what fails."""
    from mtp_export.verify.evidence.names_here import with_fused_names, with_module_names

    if check.level is Level.WEIGHTS:
        return [with_fused_names(context.layouts, item) for item in items]
    layout = next(iter(context.layouts), None) if check.level is Level.RUN else None
    return [
        item if layout is None else with_module_names(layout.stored.family, item) for item in items
    ]


def _collected(items: Iterable[Item], bundle: Place) -> list[Item]:
    """Items up to their end, or up to the exception that ended them, which becomes the last."""
    collected: list[Item] = []
    try:
        for item in items:
            collected.append(item)
    except Exception as error:
        collected.append(ended_by(error, bundle))
    return collected


def _left_out(check: Check, context: Context) -> Iterator[Item]:
    """The item of a check that does not run at all, with the reason."""
    from mtp_export.verify.files.repair import unfinished

    if check.level > context.options.level:
        requested = context.options.level.name.lower()
        why = f"--level {requested} leaves it out"
        yield not_tested(WHOLE_CHECK, why, data={LEFT_OUT: True})
    elif (item := unfinished(context)) is not None:
        files = check.level is Level.FILES
        yield item if files else not_tested(WHOLE_CHECK, "the bundle is unfinished")
    elif check.level > Level.FILES and not context.is_local:
        # Asked for by its name alone: a module may have gigabytes.
        if not check.remote_places or context.options.level is not Level.WEIGHTS:
            yield not_tested(WHOLE_CHECK, context.why_not_downloaded)
    elif check.level is Level.RUN:
        reason = context.why_not_run if check.whole_model else context.why_not_opened
        if reason is not None:
            yield not_tested(WHOLE_CHECK, reason)


def _items(place: str, context: Context) -> Iterator[Item]:
    """The items of one place of a check."""
    yield from function_at(place)(context)


def function_at(place: str) -> Callable[[Context], Iterator[Item]]:
    """The function at "module:function", by default the module's `run`."""
    module, _, name = place.partition(":")
    function: Callable[[Context], Iterator[Item]] = getattr(
        import_module(f"{__name__}.{module}"), name or "run"
    )
    return function


def _hidden_size(check: Check, context: Context) -> object:
    """Return the size of the matrices that a check multiplies; None for one that does not."""
    main = context.main
    if main is None or check.level is Level.FILES:
        return None
    return text_fields(main.config).get("hidden_size")
