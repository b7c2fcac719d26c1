"""Decoding speed of the kinds of attention, by the compiled kernels and by torch, in float32.

    python -m benchmarks.bench_families [--threads 2] [--out FOLDER]

A model of grouped-query attention and one of latent attention, of the same sizes: what compiling
gains in either, and transformers on the grouped one's weights. Weights are random. Writes
families.json to FOLDER (benchmarks/results).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.decoding import Prompts, hardware, timed, write_json
from benchmarks.make_checkpoint import make_checkpoint
from benchmarks.released import RELEASED
from mtp_runtime import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
}
ATTENTION = {
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 64},
    "glm4_moe_lite": {
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}
BATCHES = (1, 16)
INPUT_TOKENS, OUTPUT_TOKENS = 128, 64


def write_source(folder: Path, model_type: str) -> Path:
    """A random checkpoint of a family, in bf16."""
    config = RELEASED[model_type].config | SIZES | ATTENTION[model_type]
    return make_checkpoint(folder / model_type, config, max_shard_bytes=1 << 30)


def generation(source: Path, drafts: int, *, compiled: bool) -> Callable[[Prompts], object]:
    """Greedy generation by the runtime."""
    speculation: dict[str, Any] = (
        {"speculate_method": "mtp", "speculate_max_draft_token_num": drafts} if drafts else {}
    )
    llm = LLM(source, dequantize_at_load=compiled, **speculation)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    return partial(llm.generate, params=params)


def by_transformers(source: Path) -> Callable[[Prompts], object]:
    """Greedy generation by transformers, without drafts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()

    def generate(prompts: Prompts) -> object:
        ids = torch.tensor(prompts)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            pad_token_id=0,
        )

    return generate


def measured(folder: Path) -> list[dict[str, Any]]:
    """Seconds of every way to run either model, prefill included."""
    grouped, latent = (write_source(folder, model_type) for model_type in ATTENTION)
    ways = {
        "grouped, compiled": generation(grouped, 0, compiled=True),
        "grouped, compiled, 1 draft": generation(grouped, 1, compiled=True),
        "grouped, torch": generation(grouped, 0, compiled=False),
        "grouped, torch, 1 draft": generation(grouped, 1, compiled=False),
        "grouped, transformers": by_transformers(grouped),
        "latent, compiled": generation(latent, 0, compiled=True),
        "latent, torch": generation(latent, 0, compiled=False),
    }
    generator = torch.Generator().manual_seed(0)
    shape = (max(BATCHES), INPUT_TOKENS)
    every = torch.randint(2, SIZES["vocab_size"], shape, generator=generator).tolist()
    prompts = [tuple(row) for row in every]
    return [
        {"way": way, "batch": batch, "seconds": timed(partial(generate, prompts[:batch]))}
        for batch in BATCHES
        for way, generate in ways.items()
    ]


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    facts = {"hardware": hardware(), "input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    write_json(arguments.out / "families.json", facts | {"sizes": SIZES, "rows": rows})
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
