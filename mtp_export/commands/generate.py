"""mtp-export generate: decode prompts with a bundle, and show which tokens were drafted."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from mtp_export.commands import options as shared
from mtp_export.commands.output import FiguresTable, Reporting, plain_console, print_result
from mtp_export.errors import UsageError

if TYPE_CHECKING:
    from mtp_runtime import LLM, RequestOutput, SamplingParams, Summary, TokenEvent
    from mtp_runtime.prompts import Prompt

_ACCEPTED_STYLE = "green"
DECODING, PERFORMANCE = shared.DECODING, shared.PERFORMANCE
DRAFTING, DRAFTS = "Speculation", "Number and temperature of drafts"

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
Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=DRAFTING,
        help="none, mtp, inference_with_reference or draft_model.",
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        rich_help_panel=DRAFTING,
        help="Draft tokens per step, 1 to 5; with --adaptive at most so many.",
        show_default="1; with --adaptive 5",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        rich_help_panel=DRAFTS,
        help="Choose draft tokens per step by measured acceptance and times.",
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="B:K",
        rich_help_panel=DRAFTS,
        help="Draft tokens per step from each batch size on: 1:5,16:2,64:0.",
    ),
]
DraftTemperature = Annotated[
    str | None,
    typer.Option(
        metavar="X",
        rich_help_panel=DRAFTS,
        help="Temperatures of the draft tokens of a request that samples: 0.5,0.8.",
    ),
]
StopEntropy = Annotated[
    float,
    typer.Option(
        metavar="NATS",
        rich_help_panel=DRAFTS,
        help="Entropy above which no further token is drafted.",
        show_default="none",
    ),
]
NgramSize = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=DRAFTING, help="Maximum length of an n-gram."),
]
DraftModel = Annotated[
    Path | None,
    typer.Option(
        parser=shared.parse_path,
        metavar="DIR",
        rich_help_panel=DRAFTING,
        help="Second checkpoint, for --speculate-method draft_model.",
    ),
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
    speculate_method: Method = "none",
    speculate_max_draft_token_num: DraftTokens = None,
    speculate_max_ngram_size: NgramSize = 3,
    adaptive: Adaptive = False,
    k_schedule: Schedule = None,
    draft_temperature: DraftTemperature = None,
    draft_stop_entropy: StopEntropy = math.inf,
    draft_model: DraftModel = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    deterministic: Deterministic = False,
    as_json: shared.AsJson = False,
) -> None:
    """Decode prompts, with or without speculation; accepted drafts are green."""
    asked = _prompts(prompt or [], prompts)
    schedule, temperatures = _schedule(k_schedule), _numbers("draft-temperature", draft_temperature)
    from mtp_runtime import LLM, SamplingParams, summarise

    first = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_new_tokens,
        seed=seed,
        stop=tuple(stop or ()),
    )
    params = [replace(first, seed=seed + index) for index in range(len(asked))]
    llm = LLM(
        bundle,
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        speculate_method=speculate_method,
        speculate_max_draft_token_num=speculate_max_draft_token_num,
        speculate_max_ngram_size=speculate_max_ngram_size,
        adaptive=adaptive,
        k_schedule=schedule,
        draft_temperature=temperatures,
        draft_stop_entropy=draft_stop_entropy,
        draft_model=draft_model,
    )
    start = time.monotonic()
    outputs = _decode(llm, asked, params, silent=as_json)
    summary = summarise([output.metrics for output in outputs], time.monotonic() - start)
    facts = _facts(asked, outputs, summary)
    print_result(facts, summary_table(summary), Reporting(as_json=as_json))


def _schedule(text: str | None) -> list[tuple[int, int]]:
    """Return --k-schedule as (batch size, drafts)."""
    pairs = []
    for entry in text.split(",") if text is not None else ():
        size, _, drafts = entry.partition(":")
        if not (size.strip().isdecimal() and drafts.strip().isdecimal()):
            raise UsageError(
                "Option --k-schedule cannot be read",
                expected="B:K,... such as 1:5,16:2,64:0",
                found=text,
            )
        pairs.append((int(size), int(drafts)))
    return pairs


def _numbers(option: str, text: str | None) -> list[float]:
    """Return the numbers of an option, separated by commas."""
    try:
        return [float(entry) for entry in text.split(",")] if text is not None else []
    except ValueError:
        raise UsageError(
            f"Option --{option} cannot be read", expected="numbers such as 0.6,0.8", found=text
        ) from None


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
