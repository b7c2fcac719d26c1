"""Check `paths`: the same logits by every path: prefill whole or in chunks, requests alone or in a
batch, the fused kernel or its reference, with speculation or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mtp_checkpoints.families.signs import experts_of
from mtp_export.progress import CountCallback
from mtp_export.verify.check import Item, judged, not_tested
from mtp_export.verify.context import Context
from mtp_export.verify.decoding.greedy import divergences
from mtp_export.verify.diagnosis.causes import decoding as causes
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.noise import paced_logits
from mtp_runtime.layers.tensor_parallel import MODES
from mtp_runtime.models.execution import TorchLayers
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.parallel.group import Group

# Largest difference of a logit over the largest logit, fp32: some thousand roundings of 6e-8.
LARGEST_DIFFERENCE = 1e-4
_TEXTS = 3
_TOKENS = 48
_CHUNK = 7


def run(context: Context) -> Iterator[Item]:
    """Every path compared with the plain one, on the beginnings of some shared texts."""
    corpus = context.corpus
    yield _speculation(corpus, max(context.options.ks))
    model = corpus.model
    texts = [text.tokens[:_TOKENS] for text in corpus.texts.texts][:_TEXTS]
    starts, tokens = [1] * len(texts), sum(map(len, texts))
    with corpus.show_count("paths, prefill and batch", 3 * tokens, "tokens") as advance:
        whole = _logits(model, texts, advance)
        yield _close(
            "prefill whole or in chunks of 7",
            wanted=whole,
            found=paced_logits(model, texts, starts=starts, block=_CHUNK, advance=advance),
            cause=causes.CHUNKS_DIFFER,
        )
        yield _close(
            f"batch 1 or {len(texts)}",
            wanted=whole,
            found=[_logits(model, [text], advance)[0] for text in texts],
            cause=causes.BATCHES_DIFFER,
        )
    yield _attention(context, texts, whole)
    yield from _parallel(context, texts, whole)


def _parallel(
    context: Context, texts: Sequence[Sequence[int]], whole: Sequence[torch.Tensor]
) -> Iterator[Item]:
    """The model divided over the processes of this run, in either mode."""
    group = context.ranks
    if context.memory.why_one_model is not None and not group.is_one:
        yield not_tested(f"tensor parallel 1 or {group.size}", context.memory.why_one_model)
        return
    if group.is_one:
        yield not_tested(
            "tensor parallel 1 or n",
            "one process runs: start it with torchrun --nproc-per-node N to compare",
        )
        return
    for mode in MODES:
        options = LoadOptions(context.options.device, with_mtp=False, parallel_mode=mode)
        found = group.everywhere(_divided_logits, context.folder, options, texts)
        yield _close_but_for_ties(
            context,
            f"tensor parallel 1 or {group.size}, {mode}",
            wanted=whole,
            found=found,
            cause=causes.RANKS_DIFFER,
        )


def _divided_logits(
    group: Group, bundle: Path, options: LoadOptions, texts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Logits of the model that the ranks divide."""
    return _logits(load_model(bundle, options, group).model, texts)


def _attention(
    context: Context, texts: Sequence[Sequence[int]], whole: Sequence[torch.Tensor]
) -> Item:
    """The model run by torch, its attention by the kernel's float64 reference."""
    name = "attention kernel or its reference"
    options = LoadOptions(context.options.device, dequantize_at_load=False)
    if reason := context.why_not_loaded(options):
        return not_tested(name, reason)
    model = context.loaded(options).model
    assert isinstance(model.layers, TorchLayers)
    attentions = [layer.attention for layer in model.layers.layers]
    without = {type(each).__name__: None for each in attentions if not each.has_reference}
    if without:
        return not_tested(name, f"attention {', '.join(without)} has no reference to compare with")
    other = replace(model, layers=replace(model.layers, backend="reference"))
    tokens = sum(map(len, texts))
    with context.show_count("paths, attention by its reference", tokens, "tokens") as advance:
        found = _logits(other, texts, advance)
    return _close_but_for_ties(
        context, name, wanted=whole, found=found, cause=causes.BACKEND_DIFFERS
    )


def _speculation(corpus: Corpus, k: int) -> Item:
    plain, other = corpus.plain, corpus.speculative(k)
    found = list(divergences(plain, other))
    figure = f"{len(plain.outputs) - len(found)} of {len(plain.outputs)} texts equal"
    # One text in eight may meet a near-tie; more than half cannot.
    return judged(
        f"speculation off or on, k={k}",
        2 * len(found) <= len(plain.outputs),
        causes.MOST_TEXTS_DIFFER,
        figure=figure,
        bound="equal but for near-ties (check greedy)",
    )


def _logits(
    model: Model, texts: Sequence[Sequence[int]], advance: CountCallback = int
) -> list[torch.Tensor]:
    """Logits after each token but the first, in one step; every path prefills the first alone."""
    longest = max(len(text) for text in texts)
    starts = [1] * len(texts)
    return paced_logits(model, texts, starts=starts, block=longest, advance=advance)


def _close(
    name: str, *, wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor], cause: str
) -> Item:
    return _judged(name, _apart(wanted, found), wanted, cause)


def _close_but_for_ties(
    context: Context,
    name: str,
    *,
    wanted: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    cause: str,
) -> Item:
    """As `_close`, for a path that adds in another order: where two experts tie, one text may go by
    another one from a token on. So of a model with experts all texts but one count."""
    apart = sorted(_apart(wanted, found), key=lambda text: float(text.max()))
    may_tie = len(apart) > 1 and bool(torch.cat(apart).isfinite().all())
    assert context.main is not None, "a model that runs has main layers"
    if may_tie and experts_of(context.main.config):
        del apart[-1]
    return _judged(name, apart, wanted, cause)


def _apart(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest difference of a logit for every token of every text."""
    return [(a - b).abs().amax(dim=-1) for a, b in zip(wanted, found, strict=True)]


def _judged(
    name: str, apart: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], cause: str
) -> Item:
    away = float(torch.cat(list(apart)).max()) / max(float(a.abs().max()) for a in wanted)
    figure, bound = f"{away:.1e} of the largest logit", f"at most {LARGEST_DIFFERENCE:.0e}"
    return judged(name, away <= LARGEST_DIFFERENCE, cause, figure=figure, bound=bound)
