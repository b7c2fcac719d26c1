"""Check 9: the same tokens by different ways: whole or in chunks, alone or together, by the fused
kernel or its reference, with speculation or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mtp_export.verify.check import Item, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.greedy import divergences
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.noise import paced_logits
from mtp_runtime.models.load import LoadOptions
from mtp_runtime.models.model import Model, TorchLayers

# Largest difference of a logit over the largest logit, fp32: some thousand roundings of 6e-8.
LARGEST_DIFFERENCE = 1e-4
_TEXTS = 3
_TOKENS = 48
_CHUNK = 7


def run(context: Context) -> Iterator[Item]:
    """Every way against the plain one, on parts of the shared texts."""
    corpus = context.corpus
    yield _speculation(corpus, max(context.options.ks))
    model = corpus.model
    texts = [text.tokens[:_TOKENS] for text in corpus.texts.texts][:_TEXTS]
    starts = [1] * len(texts)
    whole = _logits(model, texts)
    yield _close(
        "prefill whole or in chunks of 7",
        whole,
        paced_logits(model, texts, starts, _CHUNK),
        "chunks see each other wrongly: positions or cache of a later chunk are off",
    )
    yield _close(
        f"batch 1 or {len(texts)}",
        whole,
        [_logits(model, [text])[0] for text in texts],
        "a request's logits depend on what else is in the batch: caches are mixed up",
    )
    yield _close(
        "attention kernel or its reference",
        whole,
        _logits(_by_reference(context), texts),
        "the attention backend does not compute what its float64 reference does",
    )
    yield Item(
        "tensor parallel 1 or n",
        Status.NOT_TESTED,
        cause="the runtime computes on one device; test tensor parallelism in the engine",
    )


def _by_reference(context: Context) -> Model:
    """The model run by torch, its attention by the kernel's float64 reference."""
    options = LoadOptions(context.options.device, dequantize_at_load=False)
    model = context.loaded(options).model
    assert isinstance(model.layers, TorchLayers)
    return replace(model, layers=replace(model.layers, backend="reference"))


def _speculation(corpus: Corpus, k: int) -> Item:
    plain, other = corpus.plain, corpus.speculative(k)
    found = list(divergences(plain, other))
    figure = f"{len(plain.outputs) - len(found)} of {len(plain.outputs)} texts equal"
    name, bound = f"speculation off or on, k={k}", "equal but for near-ties (check greedy)"
    # One text in eight may meet a near-tie; more than half cannot.
    if 2 * len(found) <= len(plain.outputs):
        return Item(name, Status.PASS, figure, bound)
    cause = "most texts differ with speculation: see check greedy for the first difference"
    return Item(name, Status.FAIL, figure, bound, cause=cause)


def _logits(model: Model, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits after each token but the first, which every way computes alone, in one step."""
    longest = max(len(text) for text in texts)
    return paced_logits(model, texts, [1] * len(texts), longest)


def _close(
    name: str, wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor], cause: str
) -> Item:
    largest = max(float(a.abs().max()) for a in wanted)
    away = max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)) / largest
    figure, bound = f"{away:.1e} of the largest logit", f"at most {LARGEST_DIFFERENCE:.0e}"
    if away <= LARGEST_DIFFERENCE:
        return Item(name, Status.PASS, figure, bound)
    return Item(name, Status.FAIL, figure, bound, cause=cause)
