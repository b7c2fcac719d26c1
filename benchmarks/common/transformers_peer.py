"""transformers as a peer: a model of a config with random weights in bf16, and its own generate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

_POOL = 1 << 24  # random weights, of which every tensor has some


def speeds(
    config: dict[str, Any], prompt: int, tokens: int, batches: Sequence[int]
) -> dict[str, Any]:
    """Return tokens per second of a prompt and of decoding several requests, without drafts."""
    model = _model(config)

    def seconds(rows: int, length: int, count: int) -> float:
        ids = torch.arange(3, 3 + rows * length).reshape(rows, length)
        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - begun

    seconds(1, 4, 2)
    prompt_seconds, decode = seconds(1, prompt, 1), {}
    for rows in batches:
        decode[str(rows)] = rows * tokens / (seconds(rows, 4, tokens + 1) - seconds(rows, 4, 1))
    return {"prompt": prompt / prompt_seconds, "decode": decode}


def _model(config: dict[str, Any]) -> Any:
    """Return a model whose weights are random, without the time that its own initialization takes.

    Main layers alone: transformers has no MTP modules.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    described = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    buffers = type(model.model.rotary_emb)(described)  # which are computed, not loaded
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = buffers
    pool = 0.02 * torch.randn(_POOL, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "rotary_emb" in name:
                continue
            flat = weight.view(-1)
            for start in range(0, flat.numel(), _POOL):
                part = flat[start : start + _POOL]
                part.copy_(pool[: part.numel()])
            if weight.dim() == 1 and name.endswith("norm.weight"):
                weight.add_(1)
    return model
