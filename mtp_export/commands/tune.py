"""mtp-export tune: train a bundle's draft for the target that the bundle holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from mtp_export.commands import options as shared
from mtp_export.commands import runtime
from mtp_export.commands.output import FiguresTable, heading, json_text, print_result
from mtp_export.commands.report_files import try_reports
from mtp_export.progress import format_bytes

if TYPE_CHECKING:
    from mtp_export.tune.estimate import Estimate
    from mtp_export.tune.options import TuneOptions
    from mtp_export.tune.run import TuneResult

DATA, TRAINING = "Data", "Training"

Bundle = Annotated[
    Path,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Bundle whose draft is trained.",
    ),
]
OutputDir = Annotated[
    Path,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Bundle to write.",
    ),
]
Workdir = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Folder of what a run resumes from; by default beside the output.",
    ),
]
Data = Annotated[
    Path,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.jsonl",
        rich_help_panel=DATA,
        help='JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}; completion likewise.',
    ),
]
HeldOut = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.jsonl",
        rich_help_panel=DATA,
        help="Prompts to measure acceptance on; by default a tenth of the data.",
    ),
]
NewTokens = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=DATA, help="New tokens that the target writes."),
]
TextTokens = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=DATA, help="Tokens at which a text is cut."),
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=TRAINING,
        help="Draft to train: mtp, eagle3 or parallel_heads.",
    ),
]
Steps = Annotated[
    int, typer.Option(metavar="N", rich_help_panel=TRAINING, help="Steps of the optimizer.")
]
Rate = Annotated[
    float, typer.Option(metavar="X", rich_help_panel=TRAINING, help="Highest learning rate.")
]
Depth = Annotated[
    int,
    typer.Option(
        "--k",
        metavar="K",
        rich_help_panel=TRAINING,
        help="Deepest draft to train, or number of heads, 1 to 5.",
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        metavar="R",
        rich_help_panel=TRAINING,
        help="Train changes of this rank instead of whole matrices.",
    ),
]
BatchTokens = Annotated[
    int,
    typer.Option(
        metavar="N", rich_help_panel=TRAINING, help="Tokens of a step, over all processes."
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", rich_help_panel=TRAINING, help="Seed.")]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME", rich_help_panel=shared.PERFORMANCE, help="float32 or bfloat16 products."
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        rich_help_panel=shared.PERFORMANCE,
        help="Keep parameters and optimizer in main memory.",
    ),
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        rich_help_panel=shared.PERFORMANCE,
        help="Read the target layer by layer; every line then needs a completion.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.svg",
        rich_help_panel=shared.REPORT,
        help="Write a plot of the losses.",
    ),
]


def tune(
    context: typer.Context,
    bundle: Bundle,
    data: Data,
    output_dir: OutputDir,
    workdir: Workdir = None,
    overwrite: shared.Overwrite = False,
    dry_run: shared.DryRun = False,
    held_out: HeldOut = None,
    max_new_tokens: NewTokens = 128,
    max_text_tokens: TextTokens = 2048,
    draft: Draft = "mtp",
    steps: Steps = 1000,
    lr: Rate = 2e-4,
    k: Depth = 3,
    lora_rank: LoraRank = None,
    batch_tokens: BatchTokens = 2048,
    seed: Seed = 0,
    device: runtime.FloatDevice = "cpu",
    dtype: Dtype = "float32",
    offload: Offload = False,
    stream: Stream = False,
    report: shared.Report = None,
    plot: Plot = None,
    as_json: shared.AsJson = False,
    quiet: shared.Quiet = False,
    debug: shared.Debug = False,
) -> None:
    """Train the draft of a bundle for the target that will run, quantized as it is."""
    options = _options(context)
    reporting = shared.reporting_options(context)
    taken = [options.bundle, options.output_dir, options.work, data]
    places = {"--report": report} if dry_run else {"--report": report, "--plot": plot}
    reports = try_reports(places, taken)
    if dry_run:
        found = _estimate(options)
        facts, table = found.as_json(), estimate_table(found)
        texts = {"--report": lambda: json_text(facts)}
    else:
        from mtp_export.tune.run import Silent
        from mtp_export.tune.run import tune as run

        result = run(options, Silent() if quiet else Bars())
        if result is None:  # the first process reports
            return
        facts, table = result_facts(result), result_table(result)
        texts = {"--report": lambda: json_text(facts), "--plot": lambda: loss_plot(result)}
    reports.write(texts)
    print_result(facts, table, reporting)


def _options(context: typer.Context) -> TuneOptions:
    from mtp_export.tune.options import DataOptions, TrainOptions, TuneOptions

    given = context.params
    return TuneOptions(
        bundle=given["bundle"],
        output_dir=given["output_dir"],
        data=DataOptions(
            prompts=given["data"],
            held_out=given["held_out"],
            new_tokens=given["max_new_tokens"],
            text_tokens=given["max_text_tokens"],
        ),
        draft=given["draft"],
        train=TrainOptions(
            k=given["k"],
            steps=given["steps"],
            rate=given["lr"],
            batch_tokens=given["batch_tokens"],
            lora_rank=given["lora_rank"],
            dtype=given["dtype"],
            seed=given["seed"],
        ),
        workdir=given["workdir"],
        device=given["device"],
        offload=given["offload"],
        stream=given["stream"],
        overwrite=given["overwrite"],
    )


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
