"""Decoding of a bundle on a device with its MTP module and without, as `generate` runs it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_report.stages import Row
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model

ROUNDS = 2


@dataclass(frozen=True)
class Decoding:
    """What is decoded: a bundle, dtypes, requests at a time, drafts, and tokens of a request."""

    bundle: Path
    dtypes: Sequence[str]
    batches: Sequence[int]
    drafts: Sequence[int]
    tokens: int


def decoding_rows(device: torch.device, decoding: Decoding) -> Iterator[Row]:
    """Yield rows of plain decoding and of 1 and more drafts, by dtype and batch, on a GPU by CUDA
    graphs too; speedup is over plain decoding without them."""
    for dtype in decoding.dtypes:
        loaded = load_model(decoding.bundle, LoadOptions(str(device), dtype))
        engines = {
            (graphs, k): LLM(
                decoding.bundle,
                device=str(device),
                dtype=dtype,
                loaded=loaded,
                static_graph=graphs,
                speculate_method="mtp" if k else "none",
                **({"speculate_max_draft_token_num": k} if k else {}),
            )
            for k in (0, *decoding.drafts)
            for graphs in ((False, True) if device.type == "cuda" else (False,))
        }
        for batch in decoding.batches:
            plain_rate = 0.0
            for (graphs, k), llm in engines.items():
                row = _row(llm, batch, decoding.tokens)
                plain_rate = plain_rate or row["tokens_per_second"]
                facts = {"dtype": dtype, "batch": batch, "drafts": k, "cuda_graphs": graphs}
                yield facts | row | {"speedup": row["tokens_per_second"] / plain_rate}


def _row(llm: LLM, batch: int, tokens: int) -> Row:
    """Generate for prompts of random tokens, once to warm up; the fastest round counts."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = llm.engine.model.config.vocab
    prompts = torch.randint(2, vocabulary, (batch, 48), generator=generator).tolist()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts, params)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    made = sum(output.metrics.output_tokens for output in outputs)
    steps = sum(output.metrics.target_steps for output in outputs)
    return {
        "tokens_per_second": made / min(seconds),
        "tokens_per_step": made / steps,
        "milliseconds_per_step": 1e3 * min(seconds) * batch / steps,
    }
