"""vLLM on a CPU as a peer of the runtime: the same bf16 bundle, the same prompts, the same number
of tokens. vLLM lives in a virtual environment of its own, so another interpreter runs it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_runtime import LLM, SamplingParams

_SCRIPT = Path(__file__).with_name("vllm_run.py")
_REPEATS = 3
_BATCHES = (1, 16)
Prompts = list[list[int]]


def settings_of(prefix: Path) -> dict[str, str]:
    """Variables for vLLM in a virtual environment: a thread for every core, and Intel's OpenMP
    preloaded, as it asks for, with the settings that its own executor makes for workers."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    openmp = prefix / "lib/libiomp5.so"
    if not openmp.exists():
        return threads
    return threads | {"LD_PRELOAD": str(openmp), "KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}


def against_vllm(
    python: Path,
    source: Path,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    numbers_of_drafts: Sequence[int],
) -> dict[str, Any]:
    """Seconds of generating `tokens` tokens greedily in bf16, ours and vLLM's, prefill included:
    medians of three runs, at batch 1 and 16, plain (0 drafts) or with MTP drafts. Ours in float32
    beside them."""
    asked = [list(prompt) for prompt in prompts[: max(_BATCHES)]]
    rows, version = [], ""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bf16"
        options = QuantizeOptions(BundleOptions(source, bundle), "bf16", "bf16")
        run_bundle(plan_quantize(options), lambda _: None)
        for drafts in numbers_of_drafts:
            ours = _ours(bundle, "bfloat16", asked, tokens, drafts)
            theirs = _theirs(python, bundle, asked, tokens, drafts)
            in_float32 = _ours(source, "float32", asked, tokens, drafts)
            version = theirs["version"]
            for batch in _BATCHES:
                seconds = theirs["seconds"][str(batch)]
                rows.append(
                    {
                        "batch": batch,
                        "drafts": drafts,
                        "runtime_seconds": median(ours[batch]),
                        "vllm_seconds": median(seconds),
                        "times_faster": median(seconds) / median(ours[batch]),
                        "runtime_float32_seconds": median(in_float32[batch]),
                        "runs": {"runtime": ours[batch], "vllm": seconds},
                    }
                )
    settings = settings_of(python.parent.parent)
    if "LD_PRELOAD" in settings:
        settings["LD_PRELOAD"] = Path(settings["LD_PRELOAD"]).name
    facts = {"output_tokens": tokens, "vllm": version, "vllm_environment": settings}
    return facts | {"against_vllm": rows}


def with_rows_of(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of a run, and the rows of an earlier one that differs only in numbers of drafts."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    rows = earlier.pop("against_vllm", [])
    if earlier != {key: value for key, value in facts.items() if key != "against_vllm"}:
        return facts
    done = {row["drafts"] for row in facts["against_vllm"]}
    kept = [row for row in rows if row["drafts"] not in done]
    return facts | {"against_vllm": kept + facts["against_vllm"]}


def _ours(
    source: Path, dtype: str, prompts: Prompts, tokens: int, drafts: int
) -> dict[int, list[float]]:
    """Seconds by batch size."""
    options: dict[str, Any] = {"dtype": dtype, "max_batch_size": len(prompts)}
    options["speculate_method"] = "mtp" if drafts else "none"
    if drafts:
        options["speculate_max_draft_token_num"] = drafts
    llm = LLM(source, **options)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    seconds: dict[int, list[float]] = {}
    for batch in _BATCHES:
        runs = []
        for _ in range(1 + _REPEATS):  # the first one warms up
            start = time.perf_counter()
            llm.generate(prompts[:batch], params)
            runs.append(time.perf_counter() - start)
        seconds[batch] = runs[1:]
    return seconds


def _theirs(
    python: Path, bundle: Path, prompts: Prompts, tokens: int, drafts: int
) -> dict[str, Any]:
    job, result = bundle.parent / "job.json", bundle.parent / "result.json"
    asked = {
        "main": str(bundle / "main"),
        "mtp": str(bundle / "mtp"),
        "drafts": drafts,
        "prompts": prompts,
        "batches": list(_BATCHES),
        "max_tokens": tokens,
        "max_model_len": max(map(len, prompts)) + tokens + 16,
        "logprobs": None,
        "warm_up": 1,
        "repeats": _REPEATS,
    }
    job.write_text(json.dumps(asked))
    run = subprocess.run(
        [python, _SCRIPT, job, result],
        env=os.environ | settings_of(python.parent.parent),
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if run.returncode:
        raise SystemExit(f"vLLM ended with {run.returncode}: {run.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found
