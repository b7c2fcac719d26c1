"""Decode steps as static graphs on a CPU, beside torch's eager steps and the compiled kernels.

    python -m benchmarks.bench_static_graph fixtures/deepseek-v3-tiny [--out FOLDER]

Compiles the step by AOTInductor in float32 and bfloat16, times it in turns with the others, then
decodes the fixture's prompts by each, and compares tokens. Writes static_graph.json to FOLDER
(benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench_decode import hardware
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.engine import Engine
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.prompts import read_prompts
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.static_graph.compiled import CompiledStep, compile_step
from mtp_runtime.static_graph.timing import Way, step_seconds
from mtp_runtime.tokenizer import Tokenizer

BATCHES = (1, 4, 16)
DRAFTS = (0, 2)
PAGE_SIZE, TOKENS, REPEATS = 64, 48, 3
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
EAGER, PACKAGE, KERNELS = "torch, eager", "package", "compiled kernels"


def ways_of(source: Path, dtype: str, package: Path) -> tuple[dict[str, Way], float]:
    """The three ways to compute a step, and the seconds of compiling the package."""
    static = load_model(source, LoadOptions(dtype=dtype, static_graph=True)).model
    start = time.monotonic()
    compile_step(static, PAGE_SIZE, package)
    seconds = time.monotonic() - start
    usual = load_model(source, LoadOptions(dtype=dtype)).model
    compiled = CompiledStep.open(package, static, PAGE_SIZE)
    return {EAGER: Way(static), PACKAGE: Way(static, compiled), KERNELS: Way(usual)}, seconds


def decoded(way: Way, prompts: list[tuple[int, ...]], drafts: int) -> tuple[list[Request], float]:
    """The requests of some prompts after decoding, and the seconds that it took."""
    method = "mtp" if drafts else "none"
    speculation = SpeculationConfig(method=method, max_draft_tokens=max(1, drafts))
    config = EngineConfig(page_size=PAGE_SIZE, speculation=speculation)
    engine = Engine(way.model, config, DRAFTERS[method].build, None, way.graphs)
    requests = [Request(n, prompt, PARAMS) for n, prompt in enumerate(prompts)]
    start = time.perf_counter()
    for _ in engine.run(requests):
        pass
    return requests, time.perf_counter() - start


def decoding_row(
    ways: Mapping[str, Way], prompts: list[tuple[int, ...]], drafts: int
) -> dict[str, Any]:
    """Tokens per second by way, in turns, and the share of tokens that are the eager ones."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, list[list[int]]] = {}
    accepted: dict[str, float] = {}
    for _ in range(REPEATS + 1):
        for name, way in ways.items():
            requests, seconds = decoded(way, prompts, drafts)
            rates[name].append(len(prompts) * TOKENS / seconds)
            outputs[name] = [request.output for request in requests]
            steps = sum(request.metrics.target_steps for request in requests)
            accepted[name] = len(prompts) * TOKENS / steps
    eager = outputs[EAGER]
    return {
        "batch": len(prompts),
        "drafts": drafts,
        "tokens_per_second": {name: median(found[1:]) for name, found in rates.items()},
        "tokens_per_step": accepted,
        "same_texts": {
            name: sum(a == b for a, b in zip(found, eager, strict=True)) / len(eager)
            for name, found in outputs.items()
        },
    }


def measure(source: Path, dtype: str, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
    """Everything about one dtype."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "step.pt2")
        ways, seconds = ways_of(source, dtype, package)
        size = package.stat().st_size
        steps = [
            {"batch": n, "seconds": step_seconds(ways, requests=n, page_size=PAGE_SIZE)}
            for n in BATCHES
        ]
        rows = [decoding_row(ways, prompts[:n], drafts) for n in BATCHES for drafts in DRAFTS]
    return {
        "dtype": dtype,
        "compile_seconds": seconds,
        "package_bytes": size,
        "steps": steps,
        "decoding": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    tokenizer = Tokenizer.find(arguments.source)
    known = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in read_prompts(arguments.source.parent / "prompts.jsonl")
    ]
    prompts = [known[index % len(known)][:96] for index in range(max(BATCHES))]
    rows = [measure(arguments.source, dtype, prompts) for dtype in ("float32", "bfloat16")]
    result = {"hardware": hardware(), "rows": rows}
    (arguments.out / "static_graph.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
