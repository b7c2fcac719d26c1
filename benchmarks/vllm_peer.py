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

from mtp_export.bundle import BundleOptions, run_bundle
from mtp_export.quantize import QuantizeOptions, plan_quantize
from mtp_runtime import LLM, SamplingParams

_SCRIPT = Path(__file__).with_name("vllm_run.py")
_REPEATS = 3
_DRAFTS = 2


def environment_of(prefix: Path) -> dict[str, str]:
    """The environment for vLLM in a virtual environment: with Intel's OpenMP, as it asks for."""
    openmp = prefix / "lib/libiomp5.so"
    return dict(os.environ) | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def against_vllm(
    python: Path, source: Path, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """Seconds of generating `tokens` tokens greedily in bf16, ours and vLLM's, prefill included:
    medians, at batch 1 and 16, plain and with MTP drafts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bf16"
        options = QuantizeOptions(BundleOptions(source, bundle), "bf16", "bf16")
        run_bundle(plan_quantize(options), lambda _: None)
        for batch in (1, 16):
            for drafts in (0, _DRAFTS):
                asked = [list(prompt) for prompt in prompts[:batch]]
                ours = _ours(bundle, asked, tokens, drafts)
                theirs = _theirs(python, bundle, asked, tokens, drafts, Path(folder))
                rows.append(
                    {
                        "batch": batch,
                        "drafts": drafts,
                        "runtime_seconds": ours,
                        "vllm_seconds": median(theirs["all_seconds"]),
                        "times_faster": median(theirs["all_seconds"]) / ours,
                    }
                )
    return {"output_tokens": tokens, "vllm": theirs["version"], "against_vllm": rows}


def _ours(bundle: Path, prompts: list[list[int]], tokens: int, drafts: int) -> float:
    options: dict[str, Any] = {"dtype": "bfloat16", "max_batch_size": len(prompts)}
    if drafts:
        options |= {"speculate_method": "mtp", "speculate_max_draft_token_num": drafts}
    llm = LLM(bundle, **options)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    seconds = []
    for _ in range(1 + _REPEATS):  # the first one warms up
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def _theirs(
    python: Path, bundle: Path, prompts: list[list[int]], tokens: int, drafts: int, folder: Path
) -> dict[str, Any]:
    job, result = folder / "job.json", folder / "result.json"
    asked = {
        "main": str(bundle / "main"),
        "mtp": str(bundle / "mtp"),
        "drafts": drafts,
        "prompts": prompts,
        "max_tokens": tokens,
        "max_model_len": max(map(len, prompts)) + tokens + 16,
        "batch": len(prompts),
        "logprobs": None,
        "warm_up": 1,
        "repeats": _REPEATS,
    }
    job.write_text(json.dumps(asked))
    subprocess.run(
        [python, _SCRIPT, job, result],
        env=environment_of(python.parent.parent),
        check=True,
        capture_output=True,
        timeout=600,
    )
    found: dict[str, Any] = json.loads(result.read_text())
    return found
