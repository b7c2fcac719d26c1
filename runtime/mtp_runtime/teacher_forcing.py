"""Teacher forcing: outputs of the target and its MTP modules at every position of given texts.

All texts go through a layer before the next layer is needed, so that a model of any size passes
with one layer in memory. Chunks bound the memory of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import (
    Cache,
    CachedSequence,
    LayerCaches,
    PageAllocator,
    lay_out,
    lay_out_whole,
)
from mtp_runtime.layers.attention import ForwardPass
from mtp_runtime.models.execution import DraftModule, Head, Layers
from mtp_runtime.models.model import Model, States

CHUNK_TOKENS = 512
BRANCH_ROWS = 256
PAGE_SIZE = 64
LOGIT_ELEMENTS = 1 << 24
# Log-probabilities are cut off here, so that one hopeless token does not outweigh all others.
WORST_SCORE = -8.0

# Of MTP output before and after the norm and the target's hidden state, all [n, d]: what the next
# draft is fed.
Recycle = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Text:
    """Tokens, of which the first prompt_size were given and the rest was generated."""

    tokens: tuple[int, ...]
    prompt_size: int


@dataclass(frozen=True)
class Texts:
    """Texts side by side: T rows, one per token, in order."""

    texts: tuple[Text, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each text."""
        starts, row = [], 0
        for text in self.texts:
            starts.append(row)
            row += len(text.tokens)
        return tuple(starts)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Token of every row [T]."""
        return torch.tensor([token for text in self.texts for token in text.tokens])

    def anchors(self, first: int | None = None) -> Anchors:
        """Return the rows that a draft can start from: from the last of the prompt on, or from row
        `first` of each text, all that two more tokens follow."""
        rows, owners = [], []
        for owner, (start, text) in enumerate(zip(self.starts, self.texts, strict=True)):
            begin = text.prompt_size - 1 if first is None else first
            here = range(max(0, begin), len(text.tokens) - 2)
            rows += [start + at for at in here]
            owners += [owner] * len(here)
        return Anchors(torch.tensor(rows, dtype=torch.long), torch.tensor(owners, dtype=torch.long))

    def room(self, anchors: Anchors, depth: int) -> torch.Tensor:
        """Return a mask [A]: the token that a draft at `depth` (from 1) predicts is in the text."""
        ends = torch.tensor(
            [start + len(t.tokens) for start, t in zip(self.starts, self.texts, strict=True)]
        )
        return anchors.rows + 1 + depth < ends[anchors.owners]


@dataclass(frozen=True)
class Anchors:
    """Rows [A] that drafts start from, and the text of each [A]."""

    rows: torch.Tensor
    owners: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows [n] of one or several texts, those of each text consecutive, their layout, and what they
    have beside the stream [n, layers, p], None in most models."""

    rows: torch.Tensor
    layout: BatchLayout
    per_layer: torch.Tensor | None = None

    @cached_property
    def forward(self) -> ForwardPass:
        """Their pass, one for all layers that they are taken through."""
        return ForwardPass(self.layout, per_layer=self.per_layer)


@dataclass(frozen=True)
class PagedTexts:
    """Texts with pages, those of each text its own."""

    texts: Texts
    pages: PageAllocator
    sequences: tuple[CachedSequence, ...]

    @classmethod
    def of(cls, texts: Texts, *, page_size: int = PAGE_SIZE, more: int = 0) -> PagedTexts:
        """Take pages for every text, `more` pages being left over."""
        needed = sum(-(-len(text.tokens) // page_size) for text in texts.texts)
        pages = PageAllocator(needed + more, page_size, states=len(texts.texts))
        sequences = tuple(CachedSequence() for _ in texts.texts)
        for sequence, text in zip(sequences, texts.texts, strict=True):
            pages.append(sequence, len(text.tokens))
        return cls(texts, pages, sequences)

    def chunks(
        self,
        device: torch.device,
        *,
        cut: int = 0,
        size: int = CHUNK_TOKENS,
        per_layer: torch.Tensor | None = None,
    ) -> list[Chunk]:
        """Cut all rows but the last `cut` of every text into chunks of at most `size`.

        A chunk sees those before it of its texts in the cache; short texts share one. per_layer: of
        all rows, as in Chunk.
        """
        chunks: list[list[tuple[int, int, int]]] = [[]]
        room = size
        for index, text in enumerate(self.texts.texts):
            first, length = 0, len(text.tokens) - cut
            while first < length:
                if not room:
                    chunks.append([])
                    room = size
                end = min(length, first + room)
                chunks[-1].append((index, first, end))
                room, first = room - (end - first), end
        return [self._chunk(spans, device, per_layer) for spans in chunks if spans]

    def _chunk(
        self,
        spans: Sequence[tuple[int, int, int]],
        device: torch.device,
        per_layer: torch.Tensor | None,
    ) -> Chunk:
        """Lay out spans of texts: the text's index, the first row and the end, in the text."""
        starts = self.texts.starts
        parts = [torch.arange(starts[i] + first, starts[i] + end) for i, first, end in spans]
        sequences = [self.sequences[index] for index, _, _ in spans]
        layout = lay_out_whole(self.pages, sequences, [span[1:] for span in spans], device)
        rows = torch.cat(parts).to(device)
        return Chunk(rows, layout, None if per_layer is None else per_layer[rows])


def target_states(model: Model, texts: Texts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [T, d] of every row, before and after the last norm."""
    states = model_states(model, texts)
    return states.before, states.after


def model_states(model: Model, texts: Texts) -> States:
    """Return the hidden states of every row, the model's taps included."""
    tokens, kept = texts.tokens.to(model.device), list[torch.Tensor]()
    x, paged = model.embedding(tokens), PagedTexts.of(texts)
    chunks = paged.chunks(model.device, per_layer=model.beside(tokens, x))
    for number, layer in enumerate(model.layers.each()):
        if number in model.taps:
            kept.append(x)
        x = through_layer(layer, x, paged.pages, chunks)
    return States(x, model.head.normed(x), torch.cat(kept, dim=1) if kept else None)


def through_layer(
    layer: Layers, x: torch.Tensor, pages: PageAllocator, chunks: Sequence[Chunk]
) -> torch.Tensor:
    """Take every row of x [T, d] through one layer, over a cache that is dropped afterwards."""
    cache = layer.new_cache(pages.spec(x.dtype, x.device))
    out = torch.empty_like(x)
    for chunk in chunks:
        out[chunk.rows] = layer(x[chunk.rows], cache, chunk.forward)
    return out


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of MTP modules: texts, the target's hidden states [T, d] on the side of its norm that
    the first module takes, and the rows that drafts start from.

    by_half: all rows of a depth go through attention, then all through the feed-forward, which so
    asks for every expert once; torch has to run the modules.
    """

    texts: Texts
    hidden: torch.Tensor
    anchors: Anchors
    by_half: bool = False


class _Pass(NamedTuple):
    """Rows [n] that go through a module together, the tokens that it is given for them [n], and
    their layout."""

    rows: torch.Tensor
    tokens: torch.Tensor
    layout: BatchLayout


def draft_states(
    modules: Sequence[DraftModule], inputs: DraftInputs, depths: int, recycle: Recycle | None = None
) -> list[torch.Tensor]:
    """Return MTP output [A, d] before the norm, of each depth from 1, at every anchor.

    Depth i is drafted by module i, counted from 1, and what is deeper by recursion of the last one.
    Every depth is fed with the text's own token, as if the drafts before it had been accepted. Rows
    that a module computes of a text are shared by its anchors; what a recursion adds to the cache
    is seen by its own branch alone. Rows without room mean nothing.
    """
    anchors = inputs.anchors
    branches = len(anchors.rows) * max(0, depths - len(modules))
    paged = PagedTexts.of(inputs.texts, page_size=1, more=branches)
    hidden, states = inputs.hidden, list[torch.Tensor]()
    for depth, module in enumerate(modules[:depths], start=1):
        cache = module.new_cache(paged.pages)
        passes = _every_row(paged, hidden.device, depth)
        x = _through(module, passes, hidden=hidden, cache=cache, by_half=inputs.by_half)
        states.append(x[anchors.rows])
        if depth < min(depths, len(modules)):
            hidden = _fed_back(module, x, inputs.hidden, recycle)
    branching = _Branches(
        module=modules[-1], modules=len(modules), inputs=inputs, pages=paged.pages, cache=cache
    )
    for depth in range(len(modules) + 1, depths + 1):
        back = _fed_back(modules[-1], states[-1], inputs.hidden[anchors.rows], recycle)
        states.append(branching.drafted(depth, back))
    return states


def _fed_back(
    module: DraftModule, x: torch.Tensor, hidden: torch.Tensor, recycle: Recycle | None
) -> torch.Tensor:
    """Return what the next draft is fed: by the module's contract, or by `recycle`."""
    normed = module.head.normed(x)
    return module.recycled(x, normed) if recycle is None else recycle(x, normed, hidden)


def _through(
    module: DraftModule,
    passes: Iterable[_Pass],
    hidden: torch.Tensor,
    *,
    cache: Cache,
    by_half: bool,
) -> torch.Tensor:
    """Return a module's output, fed hidden [n, d], for the rows of all passes; else zeros."""
    out, rows = torch.zeros_like(hidden), list[torch.Tensor]()
    for own in passes:
        fed = hidden[own.rows]
        if not by_half:
            out[own.rows] = module(own.tokens, fed, cache, own.layout)
            continue
        assert isinstance(cache, LayerCaches), "torch runs the module"
        taken, x = module.entering(own.tokens, fed, own.layout.positions)
        out[own.rows] = x + module.attention(taken, cache.layers[0], ForwardPass(own.layout))
        rows.append(own.rows)
    if rows:
        every = torch.cat(rows)
        out[every] = module.layer.fed_forward(out[every])
    return out


def _every_row(paged: PagedTexts, device: torch.device, depth: int) -> Iterator[_Pass]:
    """Yield the passes of all rows whose token, `depth` further on, is there."""
    tokens = paged.texts.tokens.to(device)
    for chunk in paged.chunks(device, cut=depth):
        yield _Pass(chunk.rows, tokens[chunk.rows + depth], chunk.layout)


@dataclass(frozen=True)
class _Branches:
    """Recursion of the last module, one branch per anchor, each with cache entries of
    its own behind those that the module's rows of the texts share."""

    module: DraftModule
    modules: int
    inputs: DraftInputs
    pages: PageAllocator
    cache: Cache

    def drafted(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the module's output [A, d] at a depth, fed hidden [A, d]."""
        passes, by_half = self._passes(depth, hidden.device), self.inputs.by_half
        return _through(self.module, passes, hidden, cache=self.cache, by_half=by_half)

    def _passes(self, depth: int, device: torch.device) -> Iterator[_Pass]:
        anchors, texts = self.inputs.anchors, self.inputs.texts
        tokens = texts.tokens.to(device)
        room = texts.room(anchors, depth).nonzero()[:, 0]
        for at in range(0, len(room), BRANCH_ROWS):
            part = room[at : at + BRANCH_ROWS]
            layout = self._layout(part.tolist(), depth - self.modules, device)
            yield _Pass(part, tokens[anchors.rows[part] + depth], layout)

    def _layout(self, part: Sequence[int], steps: int, device: torch.device) -> BatchLayout:
        """Lay out one row per branch: it sees the shared entries up to its anchor, then its own."""
        anchors, texts = self.inputs.anchors, self.inputs.texts
        # Pages of one token, in order of the rows of all texts, then of the branches' steps.
        count, branches = len(texts.tokens), len(anchors.rows)
        sequences, spans = [], []
        for branch in part:
            start = texts.starts[int(anchors.owners[branch])]
            branch_pages = [count + step * branches + branch for step in range(steps)]
            pages = [*range(start, int(anchors.rows[branch]) + 1), *branch_pages]
            sequences.append(CachedSequence(pages, len(pages)))
            spans.append((len(pages) - 1, len(pages)))
        return lay_out(self.pages, sequences, spans, device)


def logits_by_chunk(head: Head, normed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield float32 logits of rows that passed the norm, a bounded number at once."""
    size = max(1, LOGIT_ELEMENTS // head.linear.weight.shape[0])
    for at in range(0, len(normed), size):
        rows = slice(at, min(at + size, len(normed)))
        yield rows, head.logits(normed[rows])


def best_tokens(head: Head, normed: torch.Tensor) -> torch.Tensor:
    """Return the best token [n] of each row."""
    best = [logits.argmax(dim=-1) for _, logits in logits_by_chunk(head, normed)]
    return torch.cat(best) if best else torch.zeros(0, dtype=torch.long)


def best_and_score(
    head: Head, normed: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best token [A] of each row, and the log-probability of tokens [A]."""
    best, scores = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0)]
    for rows, logits in logits_by_chunk(head, normed):
        ids = tokens[rows].to(logits.device)[:, None]
        best.append(logits.argmax(dim=-1).cpu())
        scores.append(logits.log_softmax(dim=-1).gather(1, ids)[:, 0].cpu())
    return torch.cat(best), torch.cat(scores)


def token_scores(head: Head, normed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability [n] of a token of each row, cut off at WORST_SCORE."""
    return best_and_score(head, normed, tokens)[1].clamp(min=WORST_SCORE)


def overlaps(
    target: Head, target_rows: torch.Tensor, draft: Head, draft_rows: torch.Tensor
) -> torch.Tensor:
    """Return the sum of min(target, draft) probability [n], float64: the rate at which exact
    sampling at temperature 1 accepts a draft that was drawn from the draft's distribution."""
    parts = []
    for rows, logits in logits_by_chunk(target, target_rows):
        target_probs = logits.double().softmax(dim=-1)
        draft_probs = draft.logits(draft_rows[rows]).double().softmax(dim=-1)
        parts.append(torch.minimum(target_probs, draft_probs).sum(dim=-1))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
