"""Decode steps as static graphs on a CPU, beside torch's eager steps and the compiled kernels.

    python -m benchmarks.bench_static_graph measure fixtures/deepseek-v3-tiny    3 minutes
    python -m benchmarks.bench_static_graph page              puts them into docs/gpu.md

Compiles the step by AOTInductor in float32 and bfloat16, times it in turns with the others, then
decodes the fixture's prompts with two drafts by each, in turns too, and compares texts. Figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.decoding import hardware
from benchmarks.common.page_section import put_section
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.engine import Engine
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.prompts import read_prompts
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.static_graph.compiled import CompiledStep, compile_step
from mtp_runtime.static_graph.timing import CONTEXT_TOKENS, Way, step_seconds
from mtp_runtime.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16")
DRAFTS, PAGE_SIZE = 2, 64
RESULT, PAGE = Path("benchmarks/results/static_graph.json"), Path("docs/gpu.md")
HEADING, FOLLOWING = "### Packages on a CPU", "## Testing a machine"
EAGER, PACKAGE, KERNELS = "torch, eager", "package", "compiled kernels"


@dataclass(frozen=True)
class Size:
    """Requests of each batch, tokens of each request, and counted turns of each way."""

    batches: tuple[int, ...]
    tokens: int
    turns: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, ignore_eos=True)


def ways_of(source: Path, dtype: str, package: Path) -> tuple[dict[str, Way], float]:
    """The three ways to compute a step, and the seconds of compiling the package."""
    static = load_model(source, LoadOptions(dtype=dtype, static_graph=True)).model
    start = time.monotonic()
    compile_step(static, PAGE_SIZE, package)
    seconds = time.monotonic() - start
    usual = load_model(source, LoadOptions(dtype=dtype)).model
    compiled = CompiledStep.open(package, static, PAGE_SIZE)
    return {EAGER: Way(static), PACKAGE: Way(static, compiled), KERNELS: Way(usual)}, seconds


def decoded(
    way: Way, prompts: list[tuple[int, ...]], params: SamplingParams
) -> tuple[list[Request], float]:
    """The requests of some prompts after decoding, and the seconds that it took."""
    speculation = SpeculationConfig(method="mtp", max_draft_tokens=DRAFTS)
    config = EngineConfig(page_size=PAGE_SIZE, speculation=speculation)
    engine = Engine(way.model, config, DRAFTERS["mtp"].build, None, way.graphs)
    requests = [Request(n, prompt, params) for n, prompt in enumerate(prompts)]
    start = time.perf_counter()
    for _ in engine.run(requests):
        pass
    return requests, time.perf_counter() - start


def decoding_row(
    ways: Mapping[str, Way], prompts: list[tuple[int, ...]], size: Size
) -> dict[str, Any]:
    """Tokens per second by way, in turns, and the share of texts that are the eager ones."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, list[list[int]]] = {}
    accepted: dict[str, float] = {}
    for _ in range(size.turns + 1):
        for name, way in ways.items():
            requests, seconds = decoded(way, prompts, size.params)
            rates[name].append(len(prompts) * size.tokens / seconds)
            outputs[name] = [request.output for request in requests]
            steps = sum(request.metrics.target_steps for request in requests)
            accepted[name] = len(prompts) * size.tokens / steps
    eager = outputs[EAGER]
    return {
        "batch": len(prompts),
        "drafts": DRAFTS,
        "tokens_per_second": {name: median(found[1:]) for name, found in rates.items()},
        "tokens_per_step": accepted,
        "same_texts": {
            name: sum(a == b for a, b in zip(found, eager, strict=True)) / len(eager)
            for name, found in outputs.items()
        },
    }


def measured(
    source: Path, dtype: str, prompts: list[tuple[int, ...]], size: Size
) -> dict[str, Any]:
    """Everything about one dtype."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "step.pt2")
        ways, seconds = ways_of(source, dtype, package)
        package_bytes = package.stat().st_size
        steps = [
            {"batch": n, "seconds": step_seconds(ways, requests=n, page_size=PAGE_SIZE)}
            for n in size.batches
        ]
        rows = [decoding_row(ways, prompts[:n], size) for n in size.batches]
    return {
        "dtype": dtype,
        "compile_seconds": seconds,
        "package_bytes": package_bytes,
        "steps": steps,
        "decoding": rows,
    }


def measure(source: Path, size: Size) -> dict[str, Any]:
    """Measure in every dtype, on the prompts beside a checkpoint."""
    tokenizer = Tokenizer.find(source)
    known = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in read_prompts(source.parent / "prompts.jsonl")
    ]
    prompts = [known[index % len(known)][:96] for index in range(max(size.batches))]
    rows = [measured(source, dtype, prompts, size) for dtype in DTYPES]
    return {"hardware": hardware(), "tokens": size.tokens, "turns": size.turns, "rows": rows}


def section(result: dict[str, Any]) -> str:
    """Return the section of docs/gpu.md about a measurement."""
    ways, machine = (EAGER, PACKAGE, KERNELS), result["hardware"]
    lines = []
    for row in result["rows"]:
        for step, found in zip(row["steps"], row["decoding"], strict=True):
            times = [f"{step['seconds'][way] * 1e3:.1f}" for way in ways]
            rates = [f"{found['tokens_per_second'][way]:.1f}" for way in ways]
            cells = [row["dtype"], str(found["batch"]), *times, *rates]
            lines.append(f"| {' | '.join(cells)} |")
    compiling = ", ".join(
        f"{row['compile_seconds']:.0f} s in {row['dtype']} ({row['package_bytes'] / 1e6:.1f} MB)"
        for row in result["rows"]
    )
    return "\n".join(
        [
            HEADING,
            "",
            "`python -m benchmarks.bench_static_graph measure fixtures/deepseek-v3-tiny`,"
            f" {machine['cpu']}, {machine['threads']} threads,",
            f"commit {machine['commit'][:12]}, torch {machine['torch']}. A step is one token per"
            f" request at {CONTEXT_TOKENS} cached ones, without the head; decoding is of"
            f" {result['tokens']} tokens",
            f"per request with {DRAFTS} drafts, medians of {result['turns']} turns. Compiling took"
            f" {compiling}.",
            f"Of float32's texts {_same(result, PACKAGE)} by the package and"
            f" {_same(result, KERNELS)} by the compiled kernels are those of the eager steps.",
            "",
            "| | requests | ms per step, eager | package | compiled kernels"
            " | tokens/s, eager | package | compiled kernels |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
            *lines,
            "",
            "",
        ]
    )


def _same(result: dict[str, Any], way: str) -> str:
    """The number of float32's texts that are the eager ones, of how many."""
    rows = [one for row in result["rows"] if row["dtype"] == "float32" for one in row["decoding"]]
    same = sum(round(row["same_texts"][way] * row["batch"]) for row in rows)
    return f"{same} of {sum(row['batch'] for row in rows)}"


def put_into(page: str, part: str) -> str:
    """Return the page with this section, once."""
    return put_section(page, part, heading=HEADING, following=FOLLOWING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("page")
    measuring = actions.add_parser("measure")
    measuring.add_argument("source", type=Path)
    measuring.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    measuring.add_argument("--tokens", type=int, default=16)
    measuring.add_argument("--turns", type=int, default=2)
    measuring.add_argument("--result", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.action == "page":
        PAGE.write_text(put_into(PAGE.read_text(), section(json.loads(RESULT.read_text()))))
        return
    size = Size(tuple(given.batches), given.tokens, given.turns)
    text = json.dumps(measure(given.source, size), indent=1)
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
