"""Rounding noise of logits: the same tokens computed in steps and batches of other sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_export.progress import CountCallback
from mtp_export.verify.evidence.decode import Decoded
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out_whole
from mtp_runtime.models.model import Model

_TEXTS, _TOKENS, _BLOCK = 4, 12, 4
_PAGE_SIZE = 16


def measured_noise(model: Model, plain: Decoded) -> float:
    """The largest difference of any logit between one row per step (decoding) and several
    (verifying), alone and in a batch, on the first tokens of some of a run's outputs; at least the
    rounding of one logit."""
    texts = [tuple(request.tokens) for request in plain.requests if request.output][:_TEXTS]
    starts = [len(request.prompt) for request in plain.requests if request.output][:_TEXTS]
    texts = [t[: start + _TOKENS] for t, start in zip(texts, starts, strict=True)]
    if not texts:
        return 0.0
    slow = paced_logits(model, texts, starts=starts, block=1)
    fast = paced_logits(model, texts, starts=starts, block=_BLOCK)
    lone = paced_logits(model, texts[:1], starts=starts[:1], block=_BLOCK)
    among = max(float((a - b).abs().max()) for a, b in zip(slow, fast, strict=True))
    largest = max(float(a.abs().max()) for a in slow)
    rounding = largest * torch.finfo(model.embedding.dtype).eps
    return max(among, float((slow[0] - lone[0]).abs().max()), rounding)


@torch.inference_mode()
def paced_logits(
    model: Model,
    texts: Sequence[Sequence[int]],
    starts: Sequence[int],
    block: int,
    advance: CountCallback = int,
) -> list[torch.Tensor]:
    """Logits [s, vocab] of the tokens after each text's start, `block` tokens per step; the tokens
    before are prefilled whole, all texts in one batch. advance takes the tokens of each step."""
    config = model.config
    needed = sum(-(-len(text) // _PAGE_SIZE) for text in texts)
    pages = PageAllocator(needed, _PAGE_SIZE, states=len(texts))
    cache = model.new_cache(pages)
    sequences = [CachedSequence() for _ in texts]
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    ends = list(starts)
    while any(s.length < len(text) for s, text in zip(sequences, texts, strict=True)):
        active = [i for i, text in enumerate(texts) if sequences[i].length < len(text)]
        spans = [(sequences[i].length, min(ends[i], len(texts[i]))) for i in active]
        tokens = [t for i, (a, b) in zip(active, spans, strict=True) for t in texts[i][a:b]]
        for i, (a, b) in zip(active, spans, strict=True):
            pages.append(sequences[i], b - a)
        layout = lay_out_whole(pages, [sequences[i] for i in active], spans, model.device)
        after = model(torch.tensor(tokens, device=model.device), cache, layout).after
        advance(len(tokens))
        row = 0
        for i, (a, b) in zip(active, spans, strict=True):
            if a >= starts[i]:
                parts[i].append(model.head.logits(after[row : row + b - a]))
            row += b - a
            ends[i] = b + block
    return [torch.cat(part) if part else torch.zeros(1, config.vocab) for part in parts]
