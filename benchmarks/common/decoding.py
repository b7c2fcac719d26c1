"""Runs of the runtime: prompts, batch sizes, times, and the hardware's facts."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mtp_runtime import LLM
from mtp_runtime.prompts import read_prompts

CONCURRENCIES = (1, 2, 4, 8, 16, 20, 40, 80)
Prompts = list[tuple[int, ...]]


def hardware() -> dict[str, Any]:
    """Return the processor and the versions that the figures were measured on."""
    import transformers

    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def prompts_of(path: Path | None, llm: LLM, count: int, length: int) -> Prompts:
    """Prompts of the file, repeated to the count, or random tokens; cut to the length."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(2, llm.engine.model.config.vocab, (count, length), generator=generator)
        return [tuple(row) for row in rows.tolist()]
    known = [
        llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in read_prompts(path)
    ]
    return [known[index % len(known)][:length] for index in range(count)]


def timed(run: Callable[[], Any], repeats: int = 2) -> float:
    """Median seconds of a few runs after one for warming up."""
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return median(samples)


def write_json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n")
