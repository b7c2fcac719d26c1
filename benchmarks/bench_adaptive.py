"""Adaptive speculation against every fixed number of drafts, at each concurrency.

    python -m benchmarks.bench_adaptive fixtures/deepseek-v3-tiny --prompts fixtures/prompts.jsonl

Plain decoding, k = 1 to 5 and adaptive take turns in every round. A round's ratio is the adaptive
run's output tokens per second over those of the fixed k with the best median; the figure is the
median of the rounds. Writes adaptive.json and adaptive.md to --out (benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.bench_decode import CONCURRENCIES, Prompts, hardware, prompts_of
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model

ADAPTIVE = "adaptive"
MIN_PROMPTS = 4  # fewer are decoded several times over, so that a round is not over at once


def seconds_of(llm: LLM, prompts: Prompts, size: int, params: SamplingParams) -> float:
    """Seconds in which prompts are decoded, `size` at a time."""
    start = time.perf_counter()
    for first in range(0, len(prompts), size):
        llm.generate(prompts[first : first + size], params)
    return time.perf_counter() - start


def row_of(
    engines: dict[str, LLM], prompts: Prompts, size: int, *, tokens: int, rounds: int
) -> dict[str, object]:
    """Figures of one concurrency: tokens per second by method, and the ratios of the rounds."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked = prompts[: max(size, MIN_PROMPTS)]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, llm in engines.items():
            seconds = seconds_of(llm, asked, size, params)
            if number:  # the first round warms up, and shows the adaptive engine what lengths cost
                rates[name].append(len(asked) * tokens / seconds)
    medians = {name: median(each) for name, each in rates.items()}
    best = max((name for name in engines if name != ADAPTIVE), key=lambda name: medians[name])
    ratios = [ours / fixed for ours, fixed in zip(rates[ADAPTIVE], rates[best], strict=True)]
    return {
        "concurrency": size,
        "best_fixed": best,
        "tokens_per_second": medians,
        "adaptive_over_best": median(ratios),
        "ratios": ratios,
    }


def table(rows: list[dict[str, object]], names: list[str]) -> str:
    """The rows as Markdown."""
    lines = [
        f"| concurrency | {' | '.join(names)} | adaptive / best (rounds) |",
        "|--:|" + "--:|" * (len(names) + 1),
    ]
    for row in rows:
        rates, ratios = row["tokens_per_second"], row["ratios"]
        assert isinstance(rates, dict) and isinstance(ratios, list)
        cells = [
            f"**{rates[name]:.0f}**" if name == row["best_fixed"] else f"{rates[name]:.0f}"
            for name in names
        ]
        share = f"{row['adaptive_over_best']:.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        lines.append(f"| {row['concurrency']} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    loaded = load_model(arguments.source, LoadOptions())
    options = {"loaded": loaded, "speculate_method": "mtp"}
    engines = {"plain": LLM(arguments.source, loaded=loaded)}
    for k in range(1, 6):
        engines[f"k={k}"] = LLM(arguments.source, speculate_max_draft_token_num=k, **options)
    engines[ADAPTIVE] = LLM(arguments.source, adaptive=True, **options)
    prompts = prompts_of(
        arguments.prompts, engines["plain"], CONCURRENCIES[-1], arguments.input_tokens
    )
    rows = []
    for size in CONCURRENCIES:
        row = row_of(
            engines, prompts, size, tokens=arguments.output_tokens, rounds=arguments.rounds
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
    text = table(rows, list(engines))
    facts = {"hardware": hardware(), "threads": torch.get_num_threads(), "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "adaptive.json").write_text(json.dumps(facts, indent=2) + "\n")
    (arguments.out / "adaptive.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
