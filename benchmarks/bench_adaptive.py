"""Adaptive speculation against every fixed number of drafts, at each concurrency.

    python -m benchmarks.bench_adaptive fixtures/deepseek-v3-tiny --prompts fixtures/prompts.jsonl

Plain decoding, k = 1 to 5 and adaptive decode the same prompts in every turn, a step each in random
order, so that a machine that is slower for a while is so for all. A turn's ratio is the adaptive
run's output tokens per second over those of the fixed k that was best in the other turns (the best
of the same turn would be the luckiest one); the figure is the median of the turns. Writes
adaptive.json and adaptive.md to --out (benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.common.decoding import CONCURRENCIES, Prompts, hardware, prompts_of
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.request import RequestMetrics

ADAPTIVE = "adaptive"
MIN_TURNS, MAX_TURNS, MAX_PROMPTS = 5, 30, 96
MIN_WARM_UP = 3  # turns, in which the adaptive engine sees what lengths cost


def seconds_of(
    engines: Mapping[str, LLM], prompts: Prompts, params: SamplingParams
) -> dict[str, float]:
    """Seconds of each engine's own steps, by which it decodes prompts, all at once."""
    seconds = dict.fromkeys(engines, 0.0)
    for llm in engines.values():
        for request in llm.requests(prompts, [params] * len(prompts)):
            llm.engine.add(request)
    while working := [name for name, llm in engines.items() if llm.engine.has_work]:
        random.shuffle(working)  # a step takes longer behind some others'
        for name in working:
            start = time.perf_counter()
            engines[name].engine.step()
            seconds[name] += time.perf_counter() - start
    return seconds


def best_fixed(turns: Sequence[Mapping[str, float]]) -> str:
    """The fixed number of drafts that was fastest over some turns."""
    names = [name for name in turns[0] if name != ADAPTIVE]
    return min(names, key=lambda name: sum(turn[name] for turn in turns))


def row_of(
    engines: Mapping[str, LLM], prompts: Prompts, size: int, tokens: int
) -> dict[str, object]:
    """Figures of one concurrency: tokens per second by method, and the ratios of the turns."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    names, turns = list(engines), []
    count = max(MIN_TURNS, min(MAX_TURNS, MAX_PROMPTS // size))
    warm_up = max(MIN_WARM_UP, count // 3)
    for number in range(count + warm_up):
        if number == warm_up:
            engines[ADAPTIVE].engine.totals = RequestMetrics()
        asked = [prompts[(number * size + place) % len(prompts)] for place in range(size)]
        turns.append(seconds_of(engines, asked, params))
    turns = turns[warm_up:]
    ratios = [
        turn[best_fixed([other for other in turns if other is not turn])] / turn[ADAPTIVE]
        for turn in turns
    ]
    written = size * tokens * len(turns)
    return {
        "concurrency": size,
        "best_fixed": best_fixed(turns),
        "tokens_per_second": {name: written / sum(turn[name] for turn in turns) for name in names},
        "adaptive_over_best": median(ratios),
        "ratios": ratios,
        "lengths": lengths_of(engines[ADAPTIVE].engine.totals),
    }


def lengths_of(totals: RequestMetrics) -> list[float]:
    """Return the share of blocks that had no draft, one, two, ..."""
    at_least = [totals.target_steps, *totals.drafted, 0]
    return [round((a - b) / totals.target_steps, 3) for a, b in pairwise(at_least)]


def table(rows: list[dict[str, object]], names: list[str]) -> str:
    """The rows as Markdown."""
    lines = [
        f"| concurrency | {' | '.join(names)} | adaptive / best (quartiles of the turns) |",
        "|--:|" + "--:|" * (len(names) + 1),
    ]
    for row in rows:
        rates, ratios = row["tokens_per_second"], row["ratios"]
        assert isinstance(rates, dict) and isinstance(ratios, list)
        cells = [
            f"**{rates[name]:.0f}**" if name == row["best_fixed"] else f"{rates[name]:.0f}"
            for name in names
        ]
        low, middle, high = quantiles(ratios, n=4)
        share = f"{middle:.2f} ({low:.2f}–{high:.2f})"
        lines.append(f"| {row['concurrency']} | {' | '.join(cells)} | {share} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrencies", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    random.seed(0)
    loaded = load_model(arguments.source, LoadOptions())
    options = {"loaded": loaded, "speculate_method": "mtp"}
    engines = {"plain": LLM(arguments.source, loaded=loaded)}
    for k in range(1, 6):
        engines[f"k={k}"] = LLM(arguments.source, speculate_max_draft_token_num=k, **options)
    engines[ADAPTIVE] = LLM(arguments.source, adaptive=True, **options)
    prompts = prompts_of(arguments.prompts, engines["plain"], MAX_PROMPTS, arguments.input_tokens)
    rows = []
    for size in arguments.concurrencies:
        row = row_of(engines, prompts, size, arguments.output_tokens)
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
