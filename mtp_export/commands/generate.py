"""mtp-export generate: decode prompts with a bundle, and show which tokens were drafted."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from mtp_export.commands import drafting
from mtp_export.commands import options as shared
from mtp_export.commands.output import FiguresTable, Reporting, plain_console, print_result
from mtp_export.errors import UsageError

if TYPE_CHECKING:
    from mtp_runtime import LLM, RequestOutput, SamplingParams, Summary, TokenEvent
    from mtp_runtime.prompts import Prompt

_ACCEPTED_STYLE = "green"
DECODING, PERFORMANCE = shared.DECODING, shared.PERFORMANCE

Bundle = Annotated[
    Path,
    typer.Argument(parser=shared.parse_path, metavar="BUNDLE", help="Bundle or checkpoint."),
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", rich_help_panel=DECODING, help="Prompt; may be repeated."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="FILE.jsonl",
        rich_help_panel=DECODING,
        help='JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}.',
    ),
]
NewTokens = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=DECODING, help="Maximum new tokens per prompt."),
]
Temperature = Annotated[
    float,
    typer.Option(
        metavar="X", rich_help_panel=DECODING, help="Temperature; 0 takes the most probable token."
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="X",
        rich_help_panel=DECODING,
        help="Probability mass of the most probable tokens to sample from.",
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        metavar="N",
        rich_help_panel=DECODING,
        help="Number of most probable tokens to sample from; 0 for all.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        rich_help_panel=DECODING,
        help="Seed of the first prompt; each further prompt adds one.",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", rich_help_panel=DECODING, help="Text that ends the output."),
]
Device = Annotated[
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


def generate(
    bundle: Bundle,
    prompt: PromptTexts = None,
    prompts: PromptFile = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    stop: Stop = None,
    speculate_method: drafting.Method = "none",
    speculate_max_draft_token_num: drafting.DraftTokens = None,
    speculate_max_ngram_size: drafting.NgramSize = 3,
    adaptive: drafting.Adaptive = False,
    k_schedule: drafting.Schedule = None,
    draft_temperature: drafting.DraftTemperature = None,
    draft_stop_entropy: drafting.StopEntropy = math.inf,
    draft_model: drafting.DraftModel = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    deterministic: Deterministic = False,
    max_model_len: MaxModelLen = None,
    as_json: shared.AsJson = False,
) -> None:
    """Decode prompts, with or without speculation; accepted drafts are green."""
    asked = _prompts(prompt or [], prompts)
    from mtp_runtime import LLM, SamplingParams

    first = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_new_tokens, stop=stop
    )
    params = [replace(first, seed=seed + index) for index in range(len(asked))]
    llm = LLM(
        bundle,
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        max_model_len=max_model_len,
        speculate_method=speculate_method,
        speculate_max_draft_token_num=speculate_max_draft_token_num,
        speculate_max_ngram_size=speculate_max_ngram_size,
        adaptive=adaptive,
        k_schedule=k_schedule,
        draft_temperature=draft_temperature,
        draft_stop_entropy=draft_stop_entropy,
        draft_model=draft_model,
    )
    _report(llm, asked, params, Reporting(as_json=as_json))


def _report(
    llm: LLM, asked: list[Prompt], params: list[SamplingParams], reporting: Reporting
) -> None:
    """Decode, and print the texts and the figures."""
    from mtp_runtime import summarise

    start = time.monotonic()
    outputs = _decode(llm, asked, params, silent=reporting.as_json)
    summary = summarise([output.metrics for output in outputs], time.monotonic() - start)
    print_result(_facts(asked, outputs, summary), summary_table(summary), reporting)


def _prompts(texts: list[str], path: Path | None) -> list[Prompt]:
    from mtp_runtime.prompts import read_prompts, require_unicode

    for number, text in enumerate(texts, 1):
        require_unicode(text, f"Prompt {number} of --prompt")
    asked: list[Prompt] = [*texts, *(read_prompts(path) if path is not None else ())]
    if not asked:
        raise UsageError("There is no prompt", expected="--prompt TEXT or --prompts FILE.jsonl")
    return asked


def _decode(
    llm: LLM, asked: list[Prompt], params: list[SamplingParams], *, silent: bool
) -> list[RequestOutput]:
    """Decode and show the texts: a single one as it is generated, several at the end."""
    console = plain_console()
    if silent:
        return llm.generate(asked, params)
    if len(asked) == 1:
        outputs = llm.generate(
            asked, params, lambda event: console.print(_piece(event), end="", soft_wrap=True)
        )
        console.print()
        return outputs
    pieces = [Text() for _ in asked]
    first_id = llm.next_request_id
    outputs = llm.generate(
        asked, params, lambda event: pieces[event.request_id - first_id].append(_piece(event))
    )
    for number, piece in enumerate(pieces, 1):
        console.print(Text(f"[{number}] ", style="bold") + piece, soft_wrap=True)
    return outputs


def _piece(event: TokenEvent) -> Text:
    text = event.text if event.text or event.decoded else f"{event.token} "
    return Text(text, style=_ACCEPTED_STYLE if event.from_draft else "")


def _facts(asked: list[Prompt], outputs: list[RequestOutput], summary: Summary) -> dict[str, Any]:
    return {
        "outputs": [
            {
                "prompt": prompt,
                "text": output.text,
                "token_ids": list(output.token_ids),
                "finish_reason": output.finish_reason,
                "metrics": asdict(output.metrics),
            }
            for prompt, output in zip(asked, outputs, strict=True)
        ],
        "summary": summary.as_json(),
    }


def summary_table(summary: Summary) -> FiguresTable:
    """Return acceptance per draft position and the rates of a run."""
    table = FiguresTable()
    table.add_words("what")
    table.add_column("value", no_wrap=True)
    for place in summary.acceptance:
        for kind, share, total in (
            ("of those reached", place.conditional, place.reached),
            ("of all drafted", place.cumulative, place.verified),
        ):
            if share is not None:
                label = f"draft {place.position} accepted, {kind}"
                table.add_row(label, f"{share:.1%} ({place.accepted} of {total})")
    table.add_row("output tokens", str(summary.output_tokens))
    table.add_row("tokens per target step", f"{summary.tokens_per_step:.2f}")
    table.add_row("tokens per second", f"{summary.tokens_per_second:.1f}")
    return table
