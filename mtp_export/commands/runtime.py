"""Options of the runtime, for all commands that decode, and the LLM that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtp_checkpoints.errors import UsageError
from mtp_export.commands.garbage import few_collections
from mtp_export.commands.options import PERFORMANCE, parse_path
from mtp_export.commands.output import plain_console

if TYPE_CHECKING:
    from mtp_runtime import LLM

Bundle = Annotated[
    Path,
    typer.Argument(parser=parse_path, metavar="BUNDLE", help="Bundle or checkpoint."),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=PERFORMANCE, help="cpu, cuda or npu.")
]
FloatDevice = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=PERFORMANCE, help="cpu or cuda.")
]
Dtype = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=PERFORMANCE, help="float32 or bfloat16.")
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        rich_help_panel=PERFORMANCE,
        help="Make tokens independent of batch and drafts.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=PERFORMANCE,
        help="Tokens of prompt and output together; above index_topk attention is sparse.",
    ),
]

CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        rich_help_panel=PERFORMANCE,
        help="On a GPU, capture steps of decoding as CUDA graphs.",
    ),
]
CompiledStep = Annotated[
    Path | None,
    typer.Option(
        parser=parse_path,
        metavar="FILE.pt2",
        rich_help_panel=PERFORMANCE,
        help="Run steps of decoding by a package of mtp-export compile.",
    ),
]
ParallelMode = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        rich_help_panel=PERFORMANCE,
        help="Way in which the processes of torchrun join their parts: gather or reduce.",
        show_default="gather in float32, else reduce",
    ),
]

# Parameters of commands that are LLM's under the same name; a command has some of them.
_LLM_OPTIONS = (
    *("device", "dtype", "deterministic", "max_model_len", "draft_model", "parallel_mode"),
    *("speculate_method", "speculate_max_draft_token_num", "speculate_max_ngram_size"),
    *("adaptive", "k_schedule", "draft_temperature", "draft_stop_entropy"),
)


def _static_graph(context: typer.Context) -> Path | bool:
    """Return LLM's option of that name (UsageError where both of the command's are given)."""
    package, captured = context.params["compiled_step"], context.params["cuda_graphs"]
    if package is not None and captured:
        raise UsageError("Give one of --cuda-graphs and --compiled-step")
    return captured if package is None else Path(package)


def load_llm(context: typer.Context, bundle: Path, **more: Any) -> LLM:
    """Load a bundle with the options of a command, until it can decode at full speed.

    A terminal shows what is being done.
    """
    given = {name: context.params[name] for name in _LLM_OPTIONS if name in context.params}
    given["static_graph"] = _static_graph(context)
    with few_collections(), plain_console(stderr=True).status("Loading the runtime") as status:
        from mtp_runtime.llm import llm_of
        from mtp_runtime.parallel.group import LONE

        status.update(f"Loading {bundle}")
        llm = (context.obj or LONE).everywhere(llm_of, bundle, given | more)
        status.update("Decoding the first tokens")
        llm.warm_up()
    return llm
