"""One vLLM engine in a process of its own: `python vllm_run.py JOB.json RESULT.json`.

The job names the folders, the prompts and how many of them run together; the result holds tokens,
their log-probabilities and vLLM's own counters. vLLM holds process-wide state, so every engine gets
a fresh process.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def start(job: dict[str, Any]) -> Any:
    from vllm import LLM

    speculation = None
    if job["drafts"]:
        speculation = {
            "method": job.get("method", "mtp"),
            "model": job["mtp"],
            "num_speculative_tokens": job["drafts"],
        }
    return LLM(
        model=job["main"],
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=job["max_model_len"],
        max_num_seqs=max(job["batches"]),
        speculative_config=speculation,
        disable_log_stats=False,
        seed=0,
    )


def counters(engine: Any) -> dict[str, Any]:
    return {
        _COUNTERS[metric.name]: getattr(metric, "values", None) or metric.value
        for metric in engine.get_metrics()
        if metric.name in _COUNTERS
    }


def generate(engine: Any, job: dict[str, Any], batch: int) -> dict[str, Any]:
    """The first prompts, greedily, to the length that the job asks for; seconds of that alone."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": ids} for ids in job["prompts"][:batch]]
    params = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=job["logprobs"]
    )
    begin = time.perf_counter()
    outputs = [output.outputs[0] for output in engine.generate(asked, params, use_tqdm=False)]
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [
                {str(token): entry.logprob for token, entry in step.items()}
                for step in output.logprobs
            ]
            for output in outputs
            if output.logprobs
        ],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = start(job)
    seconds: dict[int, list[float]] = {}
    for batch in job["batches"]:
        for _ in range(job.get("warm_up", 0)):
            generate(engine, job, batch)
        results = [generate(engine, job, batch) for _ in range(job.get("repeats", 1))]
        seconds[batch] = [run["seconds"] for run in results]
    result = results[-1] | counters(engine) | {"seconds": seconds}
    result["version"] = importlib.metadata.version("vllm-cpu")
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
