"""mtp-export compile: the decode step of a bundle, compiled ahead of time for this CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_checkpoints.errors import IoError, OutputExistsError, UsageError
from mtp_checkpoints.tensors.bundle_folder import require_model
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import (
    FiguresTable,
    Reporting,
    print_result,
    remark,
)
from mtp_export.commands.runtime import BUNDLE, DTYPE
from mtp_export.options import Access, Panel, option, path_option

if TYPE_CHECKING:
    from mtp_runtime.models.model import Model

_BATCHES = (1, 16)
_EAGER, _PACKAGE, _KERNELS = "torch, eager", "package", "compiled kernels"


@dataclass(frozen=True)
class CompileCommand:
    """Options of mtp-export compile."""

    bundle: Path = field(metadata=BUNDLE)
    output: Path = field(
        metadata=path_option(
            "Package to write.", Panel.INPUT_OUTPUT, "FILE.pt2", access=Access.WRITTEN
        )
    )
    overwrite: bool = field(
        default=False,
        metadata=option("Replace a package that is already there.", Panel.INPUT_OUTPUT),
    )
    dtype: str = field(default="float32", metadata=DTYPE)
    block_size: int = field(
        default=64,
        metadata=option(
            "Tokens per page of cache, as serve has it.",
            Panel.PERFORMANCE,
            metavar="N",
            low=1,
            high=1 << 16,
        ),
    )
    reporting: Reporting = Reporting()


def compile(options: CompileCommand) -> None:
    """Compile a bundle's decode step for this CPU by AOTInductor, and time it."""
    bundle, output = options.bundle, options.output
    _check(output, overwrite=options.overwrite)
    require_model(bundle)  # before torch is imported, which takes seconds
    from mtp_export.commands.progress_bar import Standby, loading_bars

    with gc_paused(), Standby() as standby, loading_bars(standby=standby):
        standby.tell("Loading the runtime")
        from mtp_runtime.models.load import LoadOptions, load_model

        loading = LoadOptions(dtype=options.dtype, with_mtp=False, static_graph=True)
        model = load_model(bundle, loading).model
        standby.tell(f"Compiling the step of {bundle}")
        start = time.monotonic()
        _compile(model, options.block_size, output)
        seconds = time.monotonic() - start
        usual = load_model(bundle, replace(loading, static_graph=False)).model
        standby.tell("Timing it")
        times = _times(model, usual, options.block_size, output)
    facts = {
        "package": str(output),
        "bytes": output.stat().st_size,
        "seconds": round(seconds, 1),
        "milliseconds_per_step": times,
    }
    print_result(facts, _table(times), options.reporting)
    if not options.reporting.as_json:
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
