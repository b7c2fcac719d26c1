"""mtp-export tune: train a bundle's draft for the target that the bundle holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from mtp_export.commands.bundle_command import command_of
from mtp_export.commands.output import (
    DRY_RUN,
    REPORT,
    FiguresTable,
    QuietReporting,
    heading,
    json_text,
    print_result,
)
from mtp_export.commands.report_files import try_reports
from mtp_export.options import Access, Panel, path_option
from mtp_export.paths import refuse_overlaps
from mtp_export.progress import format_bytes
from mtp_export.tune.options import TuneOptions

if TYPE_CHECKING:
    from mtp_export.tune.estimate import Estimate
    from mtp_export.tune.run import TuneResult


@dataclass(frozen=True)
class TuneCommand:
    """Options of mtp-export tune."""

    tuning: TuneOptions
    dry_run: bool = field(default=False, metadata=DRY_RUN)
    report: Path | None = field(default=None, metadata=REPORT)
    plot: Path | None = field(
        default=None,
        metadata=path_option(
            "Write a plot of the losses.", Panel.REPORT, "FILE.svg", access=Access.WRITTEN
        ),
    )
    reporting: QuietReporting = QuietReporting()


def tune(options: TuneCommand) -> None:
    """Train the draft of a bundle for the target that will run, quantized as it is."""
    tuning = replace(options.tuning, command=command_of("tune", options))
    dry_run = options.dry_run
    places = {"--report": options.report}
    if not dry_run:
        places["--plot"] = options.plot
    refuse_overlaps({"the work folder": tuning.work}, places)
    reports = try_reports(places)
    if dry_run:
        found = _estimate(tuning)
        facts, table = found.as_json(), estimate_table(found)
        texts = {"--report": lambda: json_text(facts)}
    else:
        from mtp_export.commands.progress_bar import loading_bars
        from mtp_export.tune.run import Silent
        from mtp_export.tune.run import tune as run

        quiet = options.reporting.quiet
        with loading_bars(quiet=quiet):
            result = run(tuning, Silent() if quiet else Bars())
        if result is None:  # the first process reports
            return
        facts, table = result_facts(result), result_table(result)
        texts = {"--report": lambda: json_text(facts), "--plot": lambda: loss_plot(result)}
    reports.write(texts)
    print_result(facts, table, options.reporting)


def _estimate(options: TuneOptions) -> Estimate:
    from mtp_export.tune.estimate import estimate
    from mtp_export.tune.row_store import Data as TuneData
    from mtp_export.tune.run import open_checked

    source = open_checked(options)
    data = TuneData.read(options.data, source.main, options.train.seed)
    return estimate(options, source, data)


class Bars:
    """Progress as bars on stderr, with the losses by depth."""

    def texts(self, count: int) -> Callable[[int], object]:
        from mtp_export.commands.progress_bar import CountBar

        return CountBar("texts", count, "texts").advance

    def steps(self, done: int, count: int) -> Callable[[int, Sequence[float]], object]:
        from mtp_export.commands.progress_bar import CountBar

        if done == count:
            return lambda step, losses: None
        bar = CountBar("tune", count, "steps", done=done)

        def show(step: int, losses: Sequence[float]) -> None:
            bar.advance(1, "loss " + " ".join(f"{loss:.3f}" for loss in losses))

        return show


def result_facts(result: TuneResult) -> dict[str, Any]:
    """Return the result of a training: acceptance before and after, losses."""
    return {
        "output_dir": str(result.options.output_dir),
        "draft": result.options.draft,
        "steps": result.options.train.steps,
        "rows": result.rows,
        "cpu_seconds": round(result.cpu_seconds, 1),
        "before": result.before.as_json(),
        "after": result.after.as_json(),
        "losses": [{"step": int(step), "loss": round(loss, 4)} for step, loss in result.losses],
    }


def result_table(result: TuneResult) -> RenderableType:
    """Return acceptance before and after for people, with its intervals."""
    table = FiguresTable()
    table.add_words("held-out texts")
    table.add_figures("before", "after")
    sides = (result.before, result.after)
    deepest = result.options.train.k
    for position in range(deepest):
        found = [side.blocks[deepest].conditional[position] for side in sides]
        table.add_row(f"draft {position + 1} accepted, k={deepest}", *map(_shown, found))
    for k in result.before.blocks:
        found = [side.blocks[k].tokens_per_step for side in sides]
        table.add_row(f"tokens per step, k={k}", *map(_shown, found))
    return Group(heading(f"Tuned to {result.options.output_dir}"), table)


def _shown(estimate: Any) -> str:
    return "-" if estimate is None else str(estimate.shown())


def estimate_table(found: Estimate) -> RenderableType:
    """Return memory, time and disk for people."""
    table = FiguresTable()
    table.add_words("what")
    table.add_figures("takes")
    for name, value in (
        ("parameters of the draft", f"{found.parameters:,}"),
        ("parameters that are trained", f"{found.trained:,}"),
        ("parameters, gradients and optimizer", format_bytes(found.state_bytes)),
        ("weights that a step computes with", format_bytes(found.weights_bytes)),
        ("rows to train on", f"{found.rows:,}"),
        ("rows on disk", format_bytes(found.rows_bytes)),
        ("work folder, with saved states and the trained weights", format_bytes(found.disk_bytes)),
        ("bundle", format_bytes(found.output_bytes)),
        ("time of the steps, about", f"{found.seconds / 60:.1f} min"),
    ):
        table.add_row(name, value)
    return table


def loss_plot(result: TuneResult) -> str:
    """Return the plot of the first draft's loss, as SVG."""
    from mtp_export.verify.report.plots import Line, lines, standalone

    drawn = lines(
        [Line("draft 1", result.losses)], "cross entropy, nats", across="step", finest_step=0.01
    )
    return standalone(drawn, ["draft 1"])
