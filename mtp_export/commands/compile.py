"""mtp-export compile: the decode step of a bundle, compiled ahead of time for this CPU."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_checkpoints.errors import IoError, OutputExistsError, UsageError
from mtp_export.commands import options as shared
from mtp_export.commands import runtime
from mtp_export.commands.garbage import few_collections
from mtp_export.commands.output import (
    FiguresTable,
    Reporting,
    plain_console,
    print_result,
    remark,
)

if TYPE_CHECKING:
    from mtp_runtime.models.model import Model

_BATCHES = (1, 16)
_EAGER, _PACKAGE, _KERNELS = "torch, eager", "package", "compiled kernels"

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        parser=shared.parse_path,
        metavar="FILE.pt2",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Package to write.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        rich_help_panel=shared.INPUT_OUTPUT,
        help="Replace a package that is already there.",
    ),
]
BlockSize = Annotated[
    int,
    typer.Option(
        min=1,
        max=1 << 16,
        metavar="N",
        rich_help_panel=shared.PERFORMANCE,
        help="Tokens per page of cache, as serve has it.",
    ),
]


def compile(
    bundle: runtime.Bundle,
    output: Output,
    overwrite: Overwrite = False,
    dtype: runtime.Dtype = "float32",
    block_size: BlockSize = 64,
    as_json: shared.AsJson = False,
) -> None:
    """Compile a bundle's decode step for this CPU by AOTInductor, and time it."""
    _check(output, overwrite=overwrite)
    with few_collections(), plain_console(stderr=True).status("Loading the runtime") as status:
        from mtp_runtime.models.load import LoadOptions, load_model

        options = LoadOptions(dtype=dtype, with_mtp=False, static_graph=True)
        model = load_model(bundle, options).model
        status.update(f"Compiling the step of {bundle}")
        start = time.monotonic()
        _compile(model, block_size, output)
        seconds = time.monotonic() - start
        status.update("Timing it")
        usual = load_model(bundle, replace(options, static_graph=False)).model
        times = _times(model, usual, block_size, output)
    facts = {
        "package": str(output),
        "bytes": output.stat().st_size,
        "seconds": round(seconds, 1),
        "milliseconds_per_step": times,
    }
    print_result(facts, _table(times), Reporting(as_json=as_json))
    if not as_json:
        remark(_verdict(times))


def _check(output: Path, *, overwrite: bool) -> None:
    if output.suffix != ".pt2":
        raise UsageError("A package has another name", expected="--output FILE.pt2", found=output)
    if not output.parent.is_dir():
        raise IoError("There is no folder to write to", where=output.parent)
    if output.exists() and not overwrite:
        raise OutputExistsError(
            "The package is already there", where=output, todo="Add --overwrite to replace it"
        )


def _compile(model: Model, page_size: int, output: Path) -> None:
    """Compile into a file of another name, which takes the output's place when it is whole."""
    from mtp_runtime.static_graph.compiled import compile_step

    unfinished = output.with_name(f".{output.stem}.{os.getpid()}.pt2")
    try:
        compile_step(model, page_size, unfinished)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


def _times(model: Model, usual: Model, page_size: int, output: Path) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step by way and number of requests; usual: the model on compiled
    kernels."""
    from mtp_runtime.static_graph.compiled import CompiledStep
    from mtp_runtime.static_graph.timing import Way, step_seconds

    ways = {
        _EAGER: Way(model),
        _PACKAGE: Way(model, CompiledStep.open(output, model, page_size)),
        _KERNELS: Way(usual),
    }
    taken = {batch: step_seconds(ways, requests=batch, page_size=page_size) for batch in _BATCHES}
    return {
        name: {str(batch): round(1e3 * taken[batch][name], 3) for batch in _BATCHES}
        for name in ways
    }


def _table(times: dict[str, dict[str, float]]) -> Any:
    table = FiguresTable()
    table.add_words("step by")
    table.add_figures(*(f"ms, batch {batch}" for batch in _BATCHES))
    for name, by_batch in times.items():
        table.add_row(name, *(f"{by_batch[str(batch)]:.2f}" for batch in _BATCHES))
    return table


def _verdict(times: dict[str, dict[str, float]]) -> str:
    """Return what the times say about using the package."""
    shares = [times[_PACKAGE][str(batch)] / times[_KERNELS][str(batch)] for batch in _BATCHES]
    found = " and ".join(f"{share:.2f}" for share in shares)
    said = f"A step by the package takes {found} times as long as by the compiled kernels"
    if max(shares) < 1.0:
        return f"{said}: use it with --compiled-step."
    return f"{said}, the default on a CPU: it does not pay here."
