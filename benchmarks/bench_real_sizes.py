"""Real layer sizes on an ordinary machine: loading, memory, prompts and decoding beside llama.cpp.

    python -m benchmarks.bench_real_sizes SCRATCH OUTPUT.json --llama-cpp FOLDER [--layers 8] \
        [--transformers]
    python -m benchmarks.bench_real_sizes SCRATCH OUTPUT.json --llama-cpp FOLDER --model qwen3_5
    python -m benchmarks.bench_real_sizes SCRATCH OUTPUT.json --layers 47 --only int4-linears
    python -m benchmarks.bench_real_sizes SCRATCH OUTPUT.json --model deepseek_v3 --layers 5 \
        --without-drafts

Writes GLM-4.7-Flash's shapes with fewer layers and random weights to SCRATCH, or Qwen3.5-0.8B's,
whose head is its embedding, as bundles and, by the package gguf, as GGUF files; runs each in a
process of its own, in turn and several times, and keeps the best of each: neighbours on the machine
disturb single runs. Beside each loading another process reads the same bytes into new memory.
Bundles are run with every kind of activations, as llama.cpp takes int8 alone. Two drafts of a step
are accepted at the same rates in both, whatever the random weights say. FOLDER holds llama.cpp's
llama-batched-bench and llama-server; without it, ours are run alone. --transformers adds its model
in bf16. Files that SCRATCH already holds are used again.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.gguf_peer import drafted_speed, speeds, write_gguf
from benchmarks.common.given_acceptance import accept_at
from benchmarks.common.measure import machine
from benchmarks.common.real_runs import (
    CACHE_TOKENS,
    TOKENS,
    random_content,
    read_bandwidth,
    read_seconds,
    stored_bytes,
)
from benchmarks.common.transformers_peer import speeds as speeds_of_transformers
from benchmarks.make_bundle import make_bundle
from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.released import RELEASED
from mtp_runtime import LLM, SamplingParams

BATCHES = (1, 4, 16)
PROMPT = 512
# Of two drafts of a step, those of which the first is accepted, and both.
RATES, DRAFTED_TOKENS = (0.8, 0.6), 128
ACTIVATIONS = ("float32", "bfloat16", "int8")
# By model ours, and what llama.cpp has beside it.
PAIRS = {
    "deepseek_v3": {"int4-linears": "Q4_0"},
    "glm4_moe_lite": {"int4-linears": "Q4_0", "int8-head": "Q8_0"},
    "qwen3_5": {"int8-linears": "Q8_0"},
}

Run = Callable[[], dict[str, Any]]
Case = tuple[str, Path | None, Run]  # a row's name, its model's folder or file, and what runs it


def config_of(model: str, layers: int | None) -> dict[str, Any]:
    """Return a released config, with fewer layers where that is given."""
    config = RELEASED[model].config
    if layers is None:
        return config
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | {"num_hidden_layers": layers}}
    return config | {"num_hidden_layers": layers}


def models(
    scratch: Path, config: dict[str, Any], kinds: dict[str, str], programs: Path | None
) -> dict[str, Path]:
    """Return the folders and files of both, made where they are not there."""
    made = {}
    for scheme, kind in kinds.items():
        made[scheme] = scratch / scheme
        if not made[scheme].exists():
            source = make_checkpoint(
                scratch / "source",
                config,
                own_copies=False,
                max_shard_bytes=1 << 40,
                filled=lambda name: False,
            )
            partial = scratch / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            make_bundle(source, partial, scheme, random_content).rename(made[scheme])
        if programs is None:
            continue
        made[kind] = scratch / f"{kind}.gguf"
        if not made[kind].exists():
            fields = config.get("text_config") or config
            write_gguf(scratch / "partial.gguf", fields, kind).rename(made[kind])
    return made


def run_ours(folder: Path, activations: str, drafts: bool) -> dict[str, Any]:
    """Load a bundle in this process; return its seconds, memory, and tokens per second."""
    begun = time.perf_counter()
    given = {"speculate_method": "none", "cache_tokens": CACHE_TOKENS, "activations": activations}
    llm = LLM(folder, **given)
    load = time.perf_counter() - begun
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True))
    prompt = _seconds(llm, [[*range(3, 3 + PROMPT)]], 1)
    decode = {}
    for batch in BATCHES:
        prompts = [[5 + i, 6, 7, 8] for i in range(batch)]
        took = _seconds(llm, prompts, TOKENS + 1) - _seconds(llm, prompts, 1)
        decode[str(batch)] = batch * TOKENS / took
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"load": load, "peak_bytes": peak, "prompt": PROMPT / prompt, "decode": decode}
    del llm  # there may be no room for two
    return found | ({"drafted": _drafted(folder, given)} if drafts else {})


def _drafted(folder: Path, given: dict[str, Any]) -> float:
    """Return tokens per second of one request with drafts that are accepted at RATES."""
    drafts = {"speculate_method": "mtp", "speculate_max_draft_token_num": len(RATES)}
    llm = LLM(folder, **given | drafts, acceptance=accept_at(RATES))
    _seconds(llm, [[5, 6, 7, 8]], DRAFTED_TOKENS)
    took = _seconds(llm, [[5, 6, 7, 8]], DRAFTED_TOKENS) - _seconds(llm, [[5, 6, 7, 8]], 1)
    return (DRAFTED_TOKENS - 1) / took


def run_llama_cpp(programs: Path, model: Path, drafts: bool) -> dict[str, Any]:
    """Return the same of a GGUF file by llama.cpp, but for seconds and memory."""
    found: dict[str, Any] = speeds(programs, model, PROMPT, TOKENS, BATCHES)
    if drafts:
        found["drafted"] = drafted_speed(programs, model, RATES, DRAFTED_TOKENS)
    return found


def _seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    begun = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - begun


def product_flops() -> float:
    """Return the operations per second of torch's float32 product by all threads, the best of
    five."""
    matrix, best = torch.randn(2048, 2048), 0.0
    for _ in range(5):
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        best = max(best, 2 * len(matrix) ** 3 / (time.perf_counter() - begun))
    return best


def better(one: Any, other: Any, name: str = "") -> Any:
    """Return the better of two results, figure by figure: less time and memory, more speed."""
    if isinstance(one, dict):
        return {key: better(one[key], other[key], key) for key in one}
    return (min if name in ("load", "read", "peak_bytes") else max)(one, other)


def cases(made: dict[str, Path], programs: Path | None, drafts: bool) -> Iterator[Case]:
    """Yield every row of ours and llama.cpp's."""
    for name, path in made.items():
        if programs is not None and path.is_file():
            yield name, path, partial(run_llama_cpp, programs, path, drafts)
            continue
        for activations in ACTIVATIONS:
            yield f"{name}, {activations}", path, partial(in_a_process, path, activations, drafts)


def run_transformers(model: str, layers: int | None) -> dict[str, Any]:
    """Return the speeds of transformers' model of a released config, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_real_sizes", "--run-transformers"]
    sizes = [] if layers is None else ["--layers", str(layers)]
    found: dict[str, Any] = _printed([*command, "--model", model, *sizes])
    return found


def in_a_process(folder: Path, activations: str, drafts: bool) -> dict[str, Any]:
    """Return what read_seconds and run_ours do, each from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_real_sizes"]
    command += [] if drafts else ["--without-drafts"]
    read = _printed([*command, "--read", str(folder)])
    command += ["--run", str(folder), "--activations", activations]
    ours: dict[str, Any] = _printed(command)
    return {"read": read} | ours


def _printed(command: list[str]) -> Any:
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def in_turns(runs: Sequence[Case], turns: int) -> dict[str, Any]:
    """Run all models one after the other, several times; return the best of each."""
    best: dict[str, Any] = {}
    for turn in range(turns):
        for name, _, run in runs:
            found = run() | {
                "read_bandwidth": read_bandwidth(),
                "product_flops": product_flops(),
            }
            best[name] = better(best[name], found) if name in best else found
            print(f"turn {turn + 1}, {name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--model", choices=[*PAIRS], default="glm4_moe_lite")
    parser.add_argument("--layers", type=int, help="8 unless another model is named")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", help="one pair of precisions")
    parser.add_argument("--without-drafts", action="store_true", help="the module takes memory")
    parser.add_argument("--transformers", action="store_true", help="its bf16 takes memory")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run-transformers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--activations", help=argparse.SUPPRESS)
    options = parser.parse_args()
    drafts = not options.without_drafts
    if options.run:
        print(json.dumps(run_ours(options.run, options.activations, drafts)))
        return
    if options.read:
        print(json.dumps(read_seconds(options.read, drafts)))
        return
    pairs, layers = PAIRS[options.model], options.layers
    if layers is None and options.model == "glm4_moe_lite":
        layers = 8
    config = config_of(options.model, layers)
    if options.run_transformers:
        print(json.dumps(speeds_of_transformers(config, PROMPT, TOKENS, BATCHES)))
        return
    if None in (options.scratch, options.output):
        parser.error("expected SCRATCH and OUTPUT")
    kinds = {options.only: pairs[options.only]} if options.only else pairs
    made = models(options.scratch, config, kinds, options.llama_cpp)
    runs = [*cases(made, options.llama_cpp, drafts)]
    if options.transformers:
        runs.append(("bf16", None, partial(run_transformers, options.model, layers)))
    rows = in_turns(runs, options.turns)
    for name, path, _ in runs:
        if path is not None:
            rows[name]["stored_bytes"] = stored_bytes(path)
    result = {"model": options.model, "layers": layers, "machine": machine(), "rows": rows}
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
