"""mtp-export generate: decode prompts with a bundle, and show which tokens were drafted and what
they gain."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.tensors.bundle_folder import require_model
from mtp_export.busy_machine import Elapsed, Stopwatch, busy_line
from mtp_export.commands.decoding_figures import (
    acceptance_lines,
    expert_facts,
    experts_line,
    rates_line,
)
from mtp_export.commands.failures import is_interrupt
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.memory_plan import print_memory_plan
from mtp_export.commands.output import QuietReporting, plain_console, print_result, status
from mtp_export.commands.runtime import BUNDLE, Runtime
from mtp_export.options import Access, Panel, argument, option, path_option

if TYPE_CHECKING:
    from mtp_export.commands.plain_comparison import Comparison
    from mtp_runtime import LLM, SamplingParams, TokenEvent
    from mtp_runtime.prompts import Prompt
    from mtp_runtime.request import Request

_ACCEPTED_STYLE = "green underline"


@dataclass(frozen=True)
class Sampling:
    """Options of the tokens that follow a prompt."""

    max_new_tokens: int = field(
        default=64,
        metadata=option(
            "Maximum new tokens per prompt.", Panel.DECODING, metavar="N", low=1, high=1 << 30
        ),
    )
    temperature: float = field(
        default=0.0,
        metadata=option(
            "Temperature; 0 takes the most probable token.",
            Panel.DECODING,
            metavar="X",
            low=0,
            high=100,
        ),
    )
    top_p: float = field(
        default=1.0,
        metadata=option(
            "Probability mass of the most probable tokens to sample from.",
            Panel.DECODING,
            metavar="X",
            low=0,
            high=1,
        ),
    )
    top_k: int = field(
        default=0,
        metadata=option(
            "Number of most probable tokens to sample from; 0 for all.",
            Panel.DECODING,
            metavar="N",
            low=0,
            high=1 << 30,
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=option(
            "Seed of the first prompt; each further prompt adds one.",
            Panel.DECODING,
            metavar="N",
            low=0,
            high=(1 << 64) - 1,
            show_default="random",
        ),
    )
    stop: list[str] | None = field(
        default=None,
        metadata=option("Text that ends the output.", Panel.DECODING, metavar="TEXT"),
    )


@dataclass(frozen=True)
class GenerateCommand:
    """Options of mtp-export generate."""

    bundle: Path = field(metadata=BUNDLE)
    text: str | None = field(
        default=None,
        metadata=argument("The same as --prompt; - reads it from stdin.", "PROMPT", str),
    )
    prompt: list[str] | None = field(
        default=None,
        metadata=option("Prompt; may be repeated.", Panel.DECODING, metavar="TEXT"),
    )
    prompts: Path | None = field(
        default=None,
        metadata=path_option(
            'JSON lines: {"prompt": TEXT} or {"prompt_token_ids": [...]}.',
            Panel.DECODING,
            "FILE.jsonl",
            access=Access.READ,
        ),
    )
    chat: bool = field(
        default=False,
        metadata=option(
            "Put each prompt into the chat template of the bundle, as a user message.",
            Panel.DECODING,
        ),
    )
    compare: bool = field(
        default=False,
        metadata=option("Decode without drafts too, and say what they gain.", Panel.DECODING),
    )
    sampling: Sampling = Sampling()
    runtime: Runtime = Runtime()
    reporting: QuietReporting = QuietReporting()


def generate(options: GenerateCommand, context: typer.Context) -> None:
    """Decode prompts, with or without speculation; accepted drafts are green and underlined."""
    first_text = [] if options.text is None else [_typed(options.text)]
    asked = _prompts([*first_text, *(options.prompt or [])], options.prompts)
    if options.runtime.dry_run:
        print_memory_plan(options.bundle, options.runtime, context.obj, options.reporting)
        return
    if not asked:
        raise UsageError(
            "There is no prompt", expected="PROMPT, --prompt TEXT or --prompts FILE.jsonl"
        )
    if options.chat:
        _require_texts(asked)
    require_model(options.bundle)  # before torch is imported, which takes seconds
    with gc_paused():
        from mtp_runtime import SamplingParams

    sampling = options.sampling
    first = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        stop=sampling.stop,
    )
    params = _params_of_each(first, len(asked))
    llm = options.runtime.load(options.bundle, context.obj, quiet=options.reporting.quiet)
    given = asked
    if options.chat:
        given = [llm.chat_prompt([{"role": "user", "content": p}]) for p in asked]
    if options.compare:
        _require_drafts(llm)
    _report(llm, Decoding(asked, given, params), options)


@dataclass(frozen=True)
class Decoding:
    """Prompts as they were asked for and as they are given to the model, and their parameters."""

    asked: Sequence[Prompt]
    given: Sequence[Prompt]
    params: Sequence[SamplingParams]


def _params_of_each(first: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of every prompt: its seed is the one after that before it."""
    from mtp_runtime.sampling import random_seed

    seed = random_seed() if first.seed is None else first.seed
    return [replace(first, seed=seed + index) for index in range(count)]


def _report(llm: LLM, decoding: Decoding, options: GenerateCommand) -> None:
    """Decode, and print the texts and the figures; loading and compiling are over. Ctrl-C ends the
    texts, and the figures so far are printed."""
    reporting, stopwatch = options.reporting, Stopwatch()
    requests = llm.requests(decoding.given, decoding.params)
    try:
        _decode(llm, decoding, requests, silent=reporting.as_json)
    except (KeyboardInterrupt, SystemError) as error:
        if is_interrupt(error) and not reporting.as_json:
            print()
            _print_figures(llm, requests, stopwatch.elapsed(), reporting)
        raise
    elapsed = stopwatch.elapsed()
    facts = _facts(decoding.asked, requests, elapsed)
    facts["speculate_method"] = llm.engine.config.speculation.method
    if llm.expert_cache is not None:
        facts["experts"] = expert_facts(llm.expert_cache)
    if not reporting.as_json:
        _print_figures(llm, requests, elapsed, reporting, tells_busy=not options.compare)
    if options.compare:
        with status("Decoding with drafts and plainly in turn"):
            comparison = _compared(llm, decoding)
        facts["plain"] = comparison.as_json()
        if not reporting.as_json:
            print_result({}, Group(*map(Text, comparison.lines(elapsed))), reporting)
    if reporting.as_json:
        print_result(facts, "", reporting)


def _compared(llm: LLM, decoding: Decoding) -> Comparison:
    from mtp_export.commands.plain_comparison import compared

    return compared(llm, decoding.given, decoding.params)


def _print_figures(
    llm: LLM,
    requests: Sequence[Request],
    elapsed: Elapsed,
    reporting: QuietReporting,
    *,
    tells_busy: bool = True,
) -> None:
    """Print the rates of a run, and the acceptance of its drafts. tells_busy: nothing after it says
    that the machine was busy."""
    from mtp_runtime import summarise

    metrics = [request.metrics for request in requests]
    summary = summarise(metrics, elapsed.seconds)
    lines: list[RenderableType] = ["", Text(rates_line(summary, elapsed))]
    lines += acceptance_lines(summary, metrics, plain_console())
    if llm.expert_cache is not None:
        lines.append(Text(experts_line(llm.expert_cache)))
    if elapsed.is_busy and tells_busy:
        lines.append(Text(busy_line(elapsed)))
    drafts = f"drafts by {llm.engine.config.speculation.method}" if summary.acceptance else ""
    greedy = requests[0].params.greedy
    seed = "" if greedy else f"seed of the first prompt {requests[0].seed}"
    if words := ", ".join(filter(None, [drafts, seed])):
        lines.append(Text(words))
    print_result({}, Group(*lines), reporting)


def _require_drafts(llm: LLM) -> None:
    if not llm.engine.config.speculation.draft_tokens:
        raise UsageError(
            "Option --compare compares decoding with drafts and without",
            expected="--speculate-method with drafts, or a bundle with an MTP module",
            found="none",
        )


def _require_texts(asked: Sequence[Prompt]) -> None:
    if not all(isinstance(prompt, str) for prompt in asked):
        raise UsageError(
            "Option --chat makes messages of texts",
            expected='prompts of the form {"prompt": TEXT}',
            found="token ids",
        )


def _typed(text: str) -> str:
    """Return a prompt that is an argument: itself, or stdin for - (UsageError for other bytes than
    UTF-8)."""
    if text != "-":
        return text
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("The prompt on stdin is no text", found=error.reason) from None


def _prompts(texts: list[str], path: Path | None) -> list[Prompt]:
    from mtp_runtime.prompts import read_prompts, require_unicode

    for number, text in enumerate(texts, 1):
        require_unicode(text, f"Prompt {number} of --prompt")
    return [*texts, *(read_prompts(path) if path is not None else ())]


def _decode(llm: LLM, decoding: Decoding, requests: Sequence[Request], *, silent: bool) -> None:
    """Decode and show the texts: a single one as it is generated, several at the end."""
    console = plain_console()
    pieces = {request.request_id: Text() for request in requests}
    is_streamed = len(requests) == 1 and not silent
    if is_streamed:
        console.print(_echo(decoding.asked[0], console), end="", soft_wrap=True)
    with closing(llm.engine.run(requests)) as events:
        for event in events:
            if is_streamed:
                console.print(_piece(event), end="", soft_wrap=True)
            else:
                pieces[event.request_id].append_text(_piece(event))
    if is_streamed:
        console.print()
    elif not silent:
        texts = zip(decoding.asked, pieces.values(), strict=True)
        for number, (prompt, piece) in enumerate(texts, 1):
            line = Text.assemble((f"[{number}] ", "bold"), _echo(prompt, console), piece)
            console.print(line, soft_wrap=True)


def _echo(prompt: Prompt, console: Console) -> Text:
    """Return a prompt as it stands before its continuation, on a terminal alone: what is written to
    a file or a pipe is generated text."""
    is_shown = console.is_terminal and isinstance(prompt, str)
    return Text(str(prompt) if is_shown else "", style="dim")


def _piece(event: TokenEvent) -> Text:
    text = event.text if event.text or event.decoded else f"{event.token} "
    return Text(text, style=_ACCEPTED_STYLE if event.from_draft else "")


def _facts(
    asked: Sequence[Prompt], requests: Sequence[Request], elapsed: Elapsed
) -> dict[str, Any]:
    from mtp_runtime import summarise

    metrics = [request.metrics for request in requests]
    return {
        "outputs": [
            {
                "prompt": prompt,
                "text": request.text,
                "token_ids": list(request.output),
                "finish_reason": request.finish_reason,
                "seed": request.seed,
                "metrics": asdict(request.metrics),
            }
            for prompt, request in zip(asked, requests, strict=True)
        ],
        "summary": summarise(metrics, elapsed.seconds).as_json(),
        "waiting_for_processors": elapsed.waiting,
    }
