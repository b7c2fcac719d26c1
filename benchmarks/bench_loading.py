"""Loading of a bundle beside reading its files, and from weights that were kept as they are packed.

    python -m benchmarks.bench_loading BUNDLE SCRATCH OUTPUT.json [--turns 2]

Each in a process of its own, in turn, the best of all turns, the page cache emptied before each but
the last: the files read into new memory one after the other; as much new memory filled, given back
and filled again at once, which is faster where a host finds memory for a virtual machine first;
LLM(BUNDLE) until its first token; the same while its weights are kept in SCRATCH/packed; and from
there, once from the disk and once from the page cache. Then the tokens per second of one request.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.measure import drop_caches, machine
from benchmarks.common.real_runs import CACHE_TOKENS, TOKENS, read_seconds, stored_bytes
from mtp_kernels.cpu.memory import floats
from mtp_runtime import LLM, SamplingParams

READ, FILLED = "files read into new memory", "as much new memory filled"
LOADED, KEPT = "loaded", "loaded, and kept as packed"
FROM_DISK, FROM_MEMORY = "kept, from the disk", "kept, from the page cache"


def start(bundle: Path, packed: Path | None) -> dict[str, float]:
    """Load a bundle; return the seconds until its first token, and tokens per second."""
    begun = time.perf_counter()
    llm = LLM(bundle, speculate_method="none", cache_tokens=CACHE_TOKENS, packed_cache=packed)
    _generate(llm, 1)
    ready = time.perf_counter() - begun
    speed = max(TOKENS / (_generate(llm, TOKENS + 1) - _generate(llm, 1)) for _ in range(3))
    return {"seconds": ready, "tokens_per_second": speed}


def _generate(llm: LLM, tokens: int) -> float:
    begun = time.perf_counter()
    llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - begun


def in_turn(bundle: Path, packed: Path) -> dict[str, dict[str, float]]:
    """Measure each once."""
    results: dict[str, dict[str, float]] = {}
    shutil.rmtree(packed, ignore_errors=True)
    for name in (READ, FILLED, LOADED, KEPT, FROM_DISK, FROM_MEMORY):
        if name != FROM_MEMORY:
            drop_caches()
        command = [sys.executable, "-m", "benchmarks.bench_loading", "--run", name]
        output = subprocess.check_output([*command, str(bundle), str(packed)], text=True)
        results[name] = json.loads(output.splitlines()[-1])
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def run(name: str, bundle: Path, packed: Path) -> dict[str, float]:
    """Measure one of them in this process."""
    if name == READ:
        return {"seconds": read_seconds(bundle, drafts=False)}
    if name == FILLED:
        size = stored_bytes(bundle)
        return {"seconds": fill(size), "seconds_again": fill(size)}
    return start(bundle, None if name == LOADED else packed)


def fill(size: int) -> float:
    """Return the seconds of writing to every page of new memory."""
    begun = time.perf_counter()
    floats(size // 4)[:: mmap.PAGESIZE // 4] = 1
    return time.perf_counter() - begun


def best(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the least seconds and the most tokens per second of each."""
    return {
        name: {
            figure: (max if figure == "tokens_per_second" else min)(
                turn[name][figure] for turn in turns
            )
            for figure in turns[0][name]
        }
        for name in turns[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options.run, options.bundle, options.scratch)))
        return
    packed = options.scratch / "packed"
    rows = best([in_turn(options.bundle, packed) for _ in range(options.turns)])
    shutil.rmtree(packed)
    result = {"machine": machine(), "stored_bytes": stored_bytes(options.bundle), "rows": rows}
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
