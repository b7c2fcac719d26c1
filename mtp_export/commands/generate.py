"""mtp-export generate: decode prompts with a bundle, and show which tokens were drafted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from mtp_checkpoints.errors import UsageError
from mtp_export.commands.garbage import gc_paused
from mtp_export.commands.output import FiguresTable, Reporting, plain_console, print_result
from mtp_export.commands.runtime import BUNDLE, Runtime
from mtp_export.options import Access, Panel, option, path_option

if TYPE_CHECKING:
    from mtp_runtime import LLM, RequestMetrics, RequestOutput, SamplingParams, Summary, TokenEvent
    from mtp_runtime.prompts import Prompt

_ACCEPTED_STYLE = "green"
# A share of the time that threads waited for a processor from which rates are those of other load.
_BUSY = 0.1


@dataclass(frozen=True)
class Sampling:
    """Options of the tokens that follow a prompt."""

    max_new_tokens: int = field(
        default=64,
        metadata=option("Maximum new tokens per prompt.", Panel.DECODING, metavar="N"),
    )
    temperature: float = field(
        default=0.0,
        metadata=option(
            "Temperature; 0 takes the most probable token.", Panel.DECODING, metavar="X"
        ),
    )
    top_p: float = field(
        default=1.0,
        metadata=option(
            "Probability mass of the most probable tokens to sample from.",
            Panel.DECODING,
            metavar="X",
        ),
    )
    top_k: int = field(
        default=0,
        metadata=option(
            "Number of most probable tokens to sample from; 0 for all.",
            Panel.DECODING,
            metavar="N",
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=option(
            "Seed of the first prompt; each further prompt adds one.",
            Panel.DECODING,
            metavar="N",
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
            "Put each prompt into the bundle's chat template, as a user's message.", Panel.DECODING
        ),
    )
    sampling: Sampling = Sampling()
    runtime: Runtime = Runtime()
    reporting: Reporting = Reporting()


def generate(options: GenerateCommand, context: typer.Context) -> None:
    """Decode prompts, with or without speculation; accepted drafts are green."""
    asked = _prompts(options.prompt or [], options.prompts)
    if options.chat:
        _require_texts(asked)
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
    llm = options.runtime.load(options.bundle, context.obj)
    given = asked
    if options.chat:
        given = [llm.chat_prompt([{"role": "user", "content": p}]) for p in asked]
    _report(llm, Decoding(asked, given, params), options.reporting)


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


def _report(llm: LLM, decoding: Decoding, reporting: Reporting) -> None:
    """Decode, and print the texts and the figures; loading and compiling are over."""
    from mtp_runtime import summarise

    start, before = time.monotonic(), _processor_seconds()
    outputs = _decode(llm, decoding, silent=reporting.as_json)
    summary = summarise([output.metrics for output in outputs], time.monotonic() - start)
    computed, waited = map(float.__sub__, _processor_seconds(), before)
    waiting = waited / (computed + waited) if computed > 0 else 0.0
    facts = _facts(decoding.asked, outputs, summary)
    facts["speculate_method"] = llm.engine.config.speculation.method
    facts["waiting_for_processors"] = waiting
    table = summary_table(summary, [output.metrics for output in outputs])
    if waiting > _BUSY:
        table.add_row("this machine is too busy to tell: waiting for processors", f"{waiting:.0%}")
    table.add_row("drafts by", facts["speculate_method"])
    if not decoding.params[0].greedy:
        table.add_row("seed of the first prompt", str(outputs[0].seed))
    print_result(facts, table, reporting)


def _processor_seconds() -> tuple[float, float]:
    """Return the seconds that the threads of this process have computed, and have waited for a
    processor that others had, by the kernel's account; zeros where it keeps none."""
    computed = waited = 0.0
    with suppress(OSError, ValueError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                words = (thread / "schedstat").read_text().split()
                computed, waited = computed + int(words[0]) / 1e9, waited + int(words[1]) / 1e9
    return computed, waited


def _require_texts(asked: Sequence[Prompt]) -> None:
    if not all(isinstance(prompt, str) for prompt in asked):
        raise UsageError(
            "Option --chat makes messages of texts",
            expected='prompts of the form {"prompt": TEXT}',
            found="token ids",
        )


def _prompts(texts: list[str], path: Path | None) -> list[Prompt]:
    from mtp_runtime.prompts import read_prompts, require_unicode

    for number, text in enumerate(texts, 1):
        require_unicode(text, f"Prompt {number} of --prompt")
    asked: list[Prompt] = [*texts, *(read_prompts(path) if path is not None else ())]
    if not asked:
        raise UsageError("There is no prompt", expected="--prompt TEXT or --prompts FILE.jsonl")
    return asked


def _decode(llm: LLM, decoding: Decoding, *, silent: bool) -> list[RequestOutput]:
    """Decode and show the texts: a single one as it is generated, several at the end."""
    console, given, params = plain_console(), decoding.given, decoding.params
    if silent:
        return llm.generate(given, params)
    if len(given) == 1:
        outputs = llm.generate(
            given, params, lambda event: console.print(_piece(event), end="", soft_wrap=True)
        )
        console.print()
        return outputs
    pieces = [Text() for _ in given]
    first_id = llm.next_request_id
    outputs = llm.generate(
        given, params, lambda event: pieces[event.request_id - first_id].append(_piece(event))
    )
    for number, piece in enumerate(pieces, 1):
        console.print(Text(f"[{number}] ", style="bold") + piece, soft_wrap=True)
    return outputs


def _piece(event: TokenEvent) -> Text:
    text = event.text if event.text or event.decoded else f"{event.token} "
    return Text(text, style=_ACCEPTED_STYLE if event.from_draft else "")


def _facts(
    asked: Sequence[Prompt], outputs: list[RequestOutput], summary: Summary
) -> dict[str, Any]:
    return {
        "outputs": [
            {
                "prompt": prompt,
                "text": output.text,
                "token_ids": list(output.token_ids),
                "finish_reason": output.finish_reason,
                "seed": output.seed,
                "metrics": asdict(output.metrics),
            }
            for prompt, output in zip(asked, outputs, strict=True)
        ],
        "summary": summary.as_json(),
    }


def summary_table(summary: Summary, metrics: Sequence[RequestMetrics]) -> FiguresTable:
    """Return acceptance per draft position, with its interval over several prompts, and the rates
    of a run."""
    from mtp_export.verify.evidence.statistics import ratio

    table = FiguresTable()
    table.add_words("what")
    table.add_column("value", no_wrap=True)
    for place in summary.acceptance:
        having = [m for m in metrics if place.position <= len(m.drafted)]
        at = place.position - 1
        accepted = [m.accepted[at] for m in having]
        for kind, totals in (
            ("of those reached", [m.reached[at] for m in having]),
            ("of all drafted", [m.drafted[at] for m in having]),
        ):
            share = ratio(accepted, totals)
            if share is not None:
                label = f"draft {place.position} accepted, {kind}"
                table.add_row(label, f"{share.shown()} ({place.accepted} of {share.count})")
    table.add_row("output tokens", str(summary.output_tokens))
    table.add_row("tokens per target step", f"{summary.tokens_per_step:.2f}")
    table.add_row("tokens per second", f"{summary.tokens_per_second:.1f}")
    return table
