"""Figures of a run of mtp-export generate for people: its rates, the acceptance of its drafts as
bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mtp_export.busy_machine import Elapsed
from mtp_export.progress import format_bytes

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache
    from mtp_runtime import RequestMetrics, Summary

_BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉"
_GAP = "   "


def rate(tokens_per_second: float) -> str:
    """Return a rate in words."""
    digits = 0 if tokens_per_second >= 10 else 1
    return f"{tokens_per_second:.{digits}f} tokens/s"


def rates_line(summary: Summary, elapsed: Elapsed) -> str:
    """Return tokens, time and rate, and what drafts bring per step of the target: no time and no
    rate of a machine that is too busy to tell them."""
    line = f"{summary.output_tokens} tokens"
    if not elapsed.is_busy:
        line += f" in {elapsed.seconds:.2f} s: {rate(summary.tokens_per_second)}"
    if not summary.acceptance:
        return f"{line}, without drafts"
    return f"{line}, {summary.tokens_per_step:.2f} tokens per step (plain: 1)"


def experts_line(cache: ExpertCache) -> str:
    """Return how many routed experts were in memory when rows picked them, and what reading the
    others took."""
    counts = cache.counts
    return (
        f"experts: {100 * counts.hit_rate:.0f} % of {counts.requested:,} in memory,"
        f" {format_bytes(counts.read_bytes)} read, {counts.waited_seconds:.2f} s waited for"
        f" ({cache.slots:,} of {cache.experts:,} fit)"
    )


def expert_facts(cache: ExpertCache) -> dict[str, Any]:
    """Return the counts of a cache of routed experts: those that passes asked for, each once a
    layer, those that were in memory, bytes read, and seconds waited for them."""
    return {"slots": cache.slots, "experts": cache.experts, **asdict(cache.counts)}


def acceptance_lines(
    summary: Summary, metrics: Sequence[RequestMetrics], console: Console
) -> list[Text]:
    """Return a bar per draft position: the share of all its drafts that was accepted, with its 95 %
    interval, clamped to 0 to 100 %, where there are several prompts. As many stand side by side as
    the console has room for."""
    bars = [_bar(summary, metrics, place, console) for place in range(len(summary.acceptance))]
    lines: list[Text] = []
    for bar in bars:
        if lines and cell_len(f"{lines[-1].plain}{_GAP}{bar.plain}") <= console.width:
            lines[-1].append(_GAP).append_text(bar)
        else:
            lines.append(bar)
    return lines


def _bar(summary: Summary, metrics: Sequence[RequestMetrics], place: int, console: Console) -> Text:
    """Return the acceptance of one draft position, without its bar where the console is too
    narrow."""
    from mtp_export.verify.evidence.statistics import ratio

    having = [m for m in metrics if place < len(m.drafted)]
    share = ratio([m.accepted[place] for m in having], [m.drafted[place] for m in having])
    position = summary.acceptance[place]
    name = f"draft {position.position} "
    if share is None:
        return Text(f"{name}none verified")
    figures = f" {share.percent(width=2)} ({position.accepted} of {position.verified})"
    drawn = _drawn(share.value, is_ascii=console.options.ascii_only)
    if cell_len(f"{name}{drawn}{figures}") > console.width:
        return Text(f"{name}{figures}")
    return Text.assemble(name, (drawn, "green"), figures)


def _drawn(share: float, *, is_ascii: bool) -> str:
    """Return a share as a bar of fixed width."""
    eighths = round(8 * _BAR_CELLS * share)
    if is_ascii:
        return ("#" * round(eighths / 8)).ljust(_BAR_CELLS)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + _EIGHTHS[part].strip()).ljust(_BAR_CELLS)
