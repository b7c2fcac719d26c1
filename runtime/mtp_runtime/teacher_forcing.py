"""Teacher forcing: what the target and its MTP module say at every position of given texts.

All texts go through a layer before the next layer is needed, so that a model of any size passes
with one layer in memory. Chunks bound what the activations take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from mtp_kernels.batch_layout import BatchLayout
from mtp_runtime.cache import CachedSequence, PagedCache
from mtp_runtime.config import ModelConfig
from mtp_runtime.layout import lay_out
from mtp_runtime.models.deepseek_v3 import DeepseekV3, Head, Layers, MtpModule

CHUNK_TOKENS = 512
BRANCH_ROWS = 256
PAGE_SIZE = 64
LOGIT_ELEMENTS = 1 << 24

# What a recursion feeds back: MTP output before and after the norm, target hidden state [A, d].
Recycle = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Text:
    """Tokens, of which the first prompt_size were given and the rest was generated."""

    tokens: tuple[int, ...]
    prompt_size: int


@dataclass(frozen=True)
class Texts:
    """Texts side by side: T rows, one a token, in order."""

    texts: tuple[Text, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each text."""
        starts, row = [], 0
        for text in self.texts:
            starts.append(row)
            row += len(text.tokens)
        return tuple(starts)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Every row's token [T]."""
        return torch.tensor([token for text in self.texts for token in text.tokens])

    def anchors(self, first: int | None = None) -> Anchors:
        """Where a draft can start: rows from the last of the prompt on, or from row `first` of
        each text, that two more tokens follow."""
        rows, owners = [], []
        for owner, (start, text) in enumerate(zip(self.starts, self.texts, strict=True)):
            begin = text.prompt_size - 1 if first is None else first
            here = range(max(0, begin), len(text.tokens) - 2)
            rows += [start + at for at in here]
            owners += [owner] * len(here)
        return Anchors(torch.tensor(rows, dtype=torch.long), torch.tensor(owners, dtype=torch.long))

    def room(self, anchors: Anchors, depth: int) -> torch.Tensor:
        """Whether the token that a draft at `depth` (from 1) predicts is in the text [A]."""
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
class Setting:
    """What every layer of a model is run with."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: DeepseekV3) -> Setting:
        return cls(model.config, model.embedding.dtype, model.device)

    def cache(self, pages: int, page_size: int) -> PagedCache:
        """A cache of one layer."""
        width = self.config.latent + self.config.rope.size
        return PagedCache(1, pages, page_size, width, self.dtype, self.device)

    def cache_of(self, texts: Texts) -> PagedCache:
        """A cache of one layer for all tokens of some texts."""
        return self.cache(len(texts.tokens) // PAGE_SIZE + len(texts.texts), PAGE_SIZE)


@dataclass(frozen=True)
class Chunk:
    """Some rows, and how attention sees them."""

    rows: slice
    layout: BatchLayout


def chunks_of(
    texts: Texts,
    cache: PagedCache,
    device: torch.device,
    cut: int = 0,
    size: int = CHUNK_TOKENS,
) -> list[Chunk]:
    """All rows but the last `cut` of every text, in chunks of at most `size`.

    A text's tokens lie in pages of its own; a text that is cut goes on from what it left there.
    """
    sequences = [CachedSequence() for _ in texts.texts]
    for sequence, text in zip(sequences, texts.texts, strict=True):
        cache.append(sequence, len(text.tokens))
    chunks: list[Chunk] = []
    for owner, (start, text) in enumerate(zip(texts.starts, texts.texts, strict=True)):
        length = len(text.tokens) - cut
        for first in range(0, length, size):
            end = min(length, first + size)
            layout = lay_out(cache, [sequences[owner]], [(first, end)], device)
            chunks.append(Chunk(slice(start + first, start + end), layout))
    return chunks


def target_states(model: DeepseekV3, texts: Texts) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, d] of every row, before and after the last norm."""
    x = F.embedding(texts.tokens.to(model.device), model.embedding)
    cache = Setting.of(model).cache_of(texts)
    chunks = chunks_of(texts, cache, model.device)
    for layer in model.layers.each():
        x = through_layer(layer, x, cache, chunks)
    return x, model.head.normed(x)


def through_layer(
    layer: Layers, x: torch.Tensor, cache: PagedCache, chunks: Sequence[Chunk]
) -> torch.Tensor:
    """Every row of x [T, d] through one layer; the cache is of one layer, and used anew."""
    out = torch.empty_like(x)
    for chunk in chunks:
        out[chunk.rows] = layer(x[chunk.rows], cache.layers, chunk.layout)
    return out


def draft_states(
    model: DeepseekV3,
    module: MtpModule,
    texts: Texts,
    hidden: torch.Tensor,
    anchors: Anchors,
    depths: int,
    recycle: Recycle | None = None,
) -> list[torch.Tensor]:
    """MTP output [A, d] before the norm, of each depth from 1, at every anchor.

    hidden [T, d] is what the module takes of the target. Every depth is fed with the text's own
    token, as if the drafts before it had been accepted. The entries of depth 1 are shared; what a
    recursion adds to the cache is seen by its own branch alone. Rows without room mean nothing.
    """
    count, branches = len(texts.tokens), len(anchors.rows)
    cache = Setting.of(model).cache(count + branches * (depths - 1), 1)
    tokens = texts.tokens.to(hidden.device)
    first = torch.zeros_like(hidden)
    for chunk in chunks_of(texts, cache, hidden.device, cut=1):
        following = tokens[chunk.rows.start + 1 : chunk.rows.stop + 1]
        first[chunk.rows] = module(following, hidden[chunk.rows], cache.layers, chunk.layout)
    states = [first[anchors.rows]]
    for depth in range(2, depths + 1):
        x = states[-1]
        normed = module.head.normed(x)
        back = module.recycled(x, normed)
        if recycle is not None:
            back = recycle(x, normed, hidden[anchors.rows])
        out = torch.zeros_like(x)
        room = texts.room(anchors, depth).nonzero()[:, 0]
        for at in range(0, len(room), BRANCH_ROWS):
            part = room[at : at + BRANCH_ROWS]
            layout = _branches(texts, anchors, part, depth, cache, hidden.device)
            following = tokens[anchors.rows[part] + depth]
            out[part] = module(following, back[part], cache.layers, layout)
        states.append(out)
    return states


def _branches(
    texts: Texts,
    anchors: Anchors,
    part: torch.Tensor,
    depth: int,
    cache: PagedCache,
    device: torch.device,
) -> BatchLayout:
    """One row a branch: it sees the shared entries up to its anchor, then its own."""
    count, branches = len(texts.tokens), len(anchors.rows)
    sequences, spans = [], []
    for branch in part.tolist():
        row = int(anchors.rows[branch])
        start = texts.starts[int(anchors.owners[branch])]
        own = [count + (step - 2) * branches + branch for step in range(2, depth + 1)]
        pages = [*range(start, row + 1), *own]
        sequences.append(CachedSequence(pages, len(pages)))
        spans.append((len(pages) - 1, len(pages)))
    return lay_out(cache, sequences, spans, device)


def logits_by_chunk(head: Head, normed: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """float32 logits of rows that passed the norm, as many at once as memory is meant to hold."""
    size = max(1, LOGIT_ELEMENTS // head.linear.weight.shape[0])
    for at in range(0, len(normed), size):
        rows = slice(at, min(at + size, len(normed)))
        yield rows, head.logits(normed[rows])


def best_tokens(head: Head, normed: torch.Tensor) -> torch.Tensor:
    """The best token [n] of each row."""
    best = [logits.argmax(dim=-1) for _, logits in logits_by_chunk(head, normed)]
    return torch.cat(best) if best else torch.zeros(0, dtype=torch.long)


def overlaps(
    target: Head, target_rows: torch.Tensor, draft: Head, draft_rows: torch.Tensor
) -> torch.Tensor:
    """Sum of min(target, draft) probability [n], float64: how often exact sampling at temperature 1
    accepts a draft drawn from the draft's law."""
    parts = []
    for rows, logits in logits_by_chunk(target, target_rows):
        target_probs = logits.double().softmax(dim=-1)
        draft_probs = draft.logits(draft_rows[rows]).double().softmax(dim=-1)
        parts.append(torch.minimum(target_probs, draft_probs).sum(dim=-1))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
