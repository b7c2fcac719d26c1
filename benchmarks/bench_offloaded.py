"""Models that are bigger than memory: tokens per second beside what disk and memory allow.

    python -m benchmarks.bench_offloaded SCRATCH OUTPUT.json [--model glm4_5_air] \
        [--max-memory 20e9] [--tokens 16]
    python -m benchmarks.bench_offloaded SCRATCH OUTPUT.json --model deepseek_v3

Writes a bundle of released shapes to SCRATCH, every linear in int4 and the head in int8, of random
weights: GLM-4.5-Air's whole main model takes 59 GB. The codes of DeepSeek-V3's routed experts, 327
GB, are holes in sparse files: zeros that the file system makes, so that it reads them faster than a
disk. The MTP layer is a hole too, and not loaded. A process decodes one request within
--max-memory; beside it torch's sum says how fast memory is read, and the dry run how fast the disk
is. The bound is the time of reading what was read, then touching what was touched. Tokens are drawn
almost evenly, so that they pick experts anew.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.measure import PROGRAM, drop_caches, machine
from benchmarks.common.real_runs import random_content, read_bandwidth
from benchmarks.make_bundle import make_bundle
from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.released import RELEASED
from mtp_checkpoints.dtypes import OutputTensor
from mtp_checkpoints.families import family_of
from mtp_runtime import LLM, SamplingParams

_AIR = {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 131072,
    "use_qk_norm": False,
}
CONFIGS = {
    "glm4_5_air": RELEASED["glm4_moe"].config | _AIR,
    "deepseek_v3": RELEASED["deepseek_v3"].config,
}
SCHEMES = {"glm4_5_air": "int4-linears-64", "deepseek_v3": "int4-linears"}  # of 10,944 columns
HOLES = {"deepseek_v3"}  # whose routed experts have no codes


def make(scratch: Path, model: str) -> Path:
    """Return the bundle of a model, made where it is not there."""
    config, made = CONFIGS[model], scratch / model
    if made.exists():
        return made
    shards = {"own_copies": False, "max_shard_bytes": 5_000_000_000}
    source = make_checkpoint(scratch / "source", config, **shards, filled=lambda name: False)
    family = family_of(config)

    def content(tensor: OutputTensor) -> Iterable[memoryview]:
        routed = ".mlp.experts." in tensor.name and tensor.name.endswith("_packed")
        if (routed and model in HOLES) or family.mtp_layer_of(tensor.name) is not None:
            return ()
        return random_content(tensor)

    return make_bundle(source, scratch / "partial", SCHEMES[model], content).rename(made)


def plan_of(bundle: Path, limit: int) -> dict[str, Any]:
    """Return what the dry run says of a bundle within some bytes."""
    options = ["--max-memory", f"{limit}B", "--speculate-method", "none", "--dry-run", "--json"]
    command = [*PROGRAM, "generate", str(bundle), *options]
    return json.loads(subprocess.check_output(command, text=True))


def decode(bundle: Path, limit: int, tokens: int) -> dict[str, Any]:
    """Decode one request in this process; return seconds, memory, and what experts took."""
    begun = time.perf_counter()
    llm = LLM(bundle, speculate_method="none", max_memory_bytes=limit)
    loaded = time.perf_counter() - begun
    llm.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))
    drawn = SamplingParams(max_tokens=tokens, temperature=100.0, seed=0, ignore_eos=True)
    assert llm.expert_cache is not None
    llm.expert_cache.restart_counts()
    begun = time.perf_counter()
    llm.generate([[5]], drawn)  # a pass is one token
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = asdict(llm.expert_cache.counts)
    return {"loading": loaded, "seconds": seconds, "peak_bytes": peak, "experts": counts}


def touched_bytes(plan: dict[str, Any], config: dict[str, Any]) -> int:
    """Return the bytes of weights that a token is multiplied with; of the embedding it reads a
    row."""
    embedding = 2 * config["vocab_size"] * config["hidden_size"]
    resident = plan["weight_bytes"] - plan["expert_bytes"] - embedding
    return resident + plan["token_read_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", choices=[*CONFIGS], default="glm4_5_air")
    parser.add_argument("--max-memory", type=float, default=20e9, help="bytes")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--decode", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    bundle, limit = make(options.scratch, options.model), int(options.max_memory)
    if options.decode:
        print(json.dumps(decode(bundle, limit, options.tokens)))
        return
    drop_caches()
    plan = plan_of(bundle, limit)
    again = [sys.executable, "-m", "benchmarks.bench_offloaded", *sys.argv[1:], "--decode"]
    found = json.loads(subprocess.check_output(again, text=True).splitlines()[-1])
    memory = read_bandwidth()
    touched = touched_bytes(plan, CONFIGS[options.model])
    read = found["experts"]["read_bytes"] / options.tokens
    bound = None  # where holes are read
    if options.model not in HOLES:
        bound = read / plan["read_bytes_per_second"] + touched / memory
    result = {
        "model": options.model,
        "has_holes": options.model in HOLES,
        "machine": machine(),
        "max_memory_bytes": limit,
        "tokens": options.tokens,
        "plan": plan,
        **found,
        "seconds_per_token": found["seconds"] / options.tokens,
        "read_bytes_per_token": read,
        "touched_bytes_per_token": touched,
        "memory_bytes_per_second": memory,
        "bound_seconds_per_token": bound,
    }
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
