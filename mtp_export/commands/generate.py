"""mtp-export generate: decode prompts with a bundle, show what was drafted, and count."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtp_export.errors import UsageError
from mtp_runtime.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from mtp_runtime import LLM, RequestOutput, SamplingParams, Summary, TokenEvent

_ACCEPTED_STYLE = "green"


Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle or a checkpoint.")]
PromptTexts = Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")]
PromptFile = Annotated[
    Path | None, typer.Option(help='JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}.')
]
Method = Annotated[str, typer.Option(help="none, mtp, inference_with_reference or draft_model.")]
DraftTokens = Annotated[int, typer.Option(help="Drafts a step, 1 to 5.")]
NgramSize = Annotated[int, typer.Option(help="Longest n-gram looked up.")]
DraftModel = Annotated[
    Path | None, typer.Option(help="A second checkpoint, for --speculate-method draft_model.")
]
NewTokens = Annotated[int, typer.Option(help="The most tokens put out a prompt.")]
Temperature = Annotated[float, typer.Option(help="0 takes the best token.")]
TopP = Annotated[float, typer.Option(help="Mass of the best tokens to draw from.")]
TopK = Annotated[int, typer.Option(help="Best tokens to draw from; 0 for all.")]
Seed = Annotated[int, typer.Option(help="Seed of the first prompt; the next has the next.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Tokens do not depend on batch or drafts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def generate(
    bundle: Bundle,
    prompt: PromptTexts = None,
    prompts: PromptFile = None,
    speculate_method: Method = "none",
    speculate_max_draft_token_num: DraftTokens = 1,
    speculate_max_ngram_size: NgramSize = 3,
    draft_model: DraftModel = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    stop: Stop = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Decode prompts, with or without speculation; accepted drafts are green."""
    asked = _prompts(prompt or [], prompts)
    from mtp_runtime import LLM, SamplingParams, summarise

    llm = LLM(
        bundle,
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        speculate_method=speculate_method,
        speculate_max_draft_token_num=speculate_max_draft_token_num,
        speculate_max_ngram_size=speculate_max_ngram_size,
        draft_model=draft_model,
    )
    params = [
        SamplingParams(temperature, top_p, top_k, max_new_tokens, seed + index, tuple(stop or ()))
        for index in range(len(asked))
    ]
    start = time.monotonic()
    outputs = _run(llm, asked, params, as_json)
    summary = summarise([output.metrics for output in outputs], time.monotonic() - start)
    if as_json:
        print(json.dumps(_facts(asked, outputs, summary), indent=2, ensure_ascii=False))
    else:
        Console().print(_table(summary))


def _prompts(texts: list[str], path: Path | None) -> list[Prompt]:
    asked: list[Prompt] = [*texts, *(read_prompts(path) if path is not None else ())]
    if not asked:
        raise UsageError("There is no prompt", expected="--prompt TEXT or --prompts FILE.jsonl")
    return asked


def _run(
    llm: LLM, asked: list[Prompt], params: list[SamplingParams], quiet: bool
) -> list[RequestOutput]:
    """A single prompt streams; several are shown one after the other when all are done."""
    console = Console(highlight=False)
    if quiet:
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


def _table(summary: Summary) -> Table:
    table = Table("what", "value")
    for place in summary.acceptance:
        for kind, share, total in (
            ("if the drafts before it were", place.conditional, place.reached),
            ("of all drafted there", place.cumulative, place.verified),
        ):
            if share is not None:
                label = f"draft {place.position} accepted, {kind}"
                table.add_row(label, f"{share:.1%} ({place.accepted} of {total})")
    table.add_row("output tokens", str(summary.output_tokens))
    table.add_row("tokens per target step", f"{summary.tokens_per_step:.2f}")
    table.add_row("tokens per second", f"{summary.tokens_per_second:.1f}")
    return table
