"""vLLM's own MTP module of MiMo-7B, executed: `python vllm_mimo.py JOB RESULT`.

All of it is vLLM's but the attention over a paged cache, for which torch attends to all positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from vllm_drafts import built, engine_config, stored_in
from vllm_modules import run_job


class Attention(nn.Module):
    """Causal attention of queries, keys and values [T, heads * d], by the sizes of vLLM's own."""

    def __init__(self, heads: int, kv_heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scale = heads, kv_heads, scale

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            one.unflatten(-1, (count, -1)).transpose(0, 1)
            for one, count in zip(given, counts, strict=True)
        )
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def drafts_of(
    main: str, draft: str, states: str, contexts: list[list[int]], counts: list[int]
) -> list[list[int]]:
    """Best drafts after each context, each from the one before. states: a file of the main model's
    hidden states before the last norm, by the number of the context, of all but its last token."""
    from safetensors.torch import load_file

    model = built(engine_config(main, draft, "mtp", "float32"))
    model.load_weights(iter((stored_in(main) | stored_in(draft)).items()))
    for module in model.modules():
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
    for layer in model.model.mtp_layers.values():
        own = layer.mtp_block.self_attn
        own.attn = Attention(own.num_heads, own.num_kv_heads, own.scaling)
    hidden = load_file(states)
    return [
        chained(model, context, hidden[str(number)], count)
        for number, (context, count) in enumerate(zip(contexts, counts, strict=True))
    ]


@torch.inference_mode()
def chained(model: Any, context: list[int], hidden: torch.Tensor, count: int) -> list[int]:
    """Drafts after tokens [T + 1], of hidden states [T, d]."""
    known, made = [*context], list[int]()
    for _ in range(count):
        after = model(torch.tensor(known[1:]), torch.arange(len(hidden)), hidden)
        made.append(int(model.compute_logits(after[-1:]).argmax()))
        known.append(made[-1])
        hidden = torch.cat([hidden, after[-1:]])
    return made


if __name__ == "__main__":
    run_job(drafts_of)
