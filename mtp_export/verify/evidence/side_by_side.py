"""Plain text under a main model and under variants of it that differ in some layers, side by side:
each layer is read once, and the experts of it that are picked, whatever the number of variants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import torch

from mtp_export.progress import CountCallback
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import PlainTexts
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.streaming import StreamedModel, pass_through
from mtp_runtime.teacher_forcing import Chunk, PagedTexts

V = TypeVar("V")
# Layers to be tried in place of one, by its number, each with what it stands for: equal ones of
# several layers are one variant.
VariantsOf = Callable[[int, DecoderLayer], Iterable[tuple[V, DecoderLayer]]]
# The least mean change of the rows, in their norm's share: a smaller one changes no token.
LEAST_MOVED = 0.02


def among(variants_of: VariantsOf[V], some: Collection[V]) -> VariantsOf[V]:
    """Return what yields some of the variants alone."""
    return lambda number, layer: (
        (one, other) for one, other in variants_of(number, layer) if one in some
    )


def joined(*every: VariantsOf[V]) -> VariantsOf[V]:
    """Return what yields the variants of each."""
    return lambda number, layer: chain(*(one(number, layer) for one in every))


@dataclass(frozen=True)
class SideBySide(Generic[V]):
    """Likelihood of plain text under a model as it is, and under each variant that changes its
    rows."""

    own: Likelihood
    tried: tuple[tuple[V, Likelihood], ...]

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        streamed: StreamedModel,
        plain: PlainTexts,
        variants_of: VariantsOf[V],
        advance: CountCallback = int,
    ) -> SideBySide[V]:
        """Take the texts through the layers, one at a time. advance takes the number of layers that
        are done."""
        paged = PagedTexts.of(plain.texts)
        embedded = streamed.embedded(plain.texts.tokens.to(streamed.device))
        own = _Copy(embedded, paged.chunks(streamed.device))
        copies = dict[V, _Copy]()
        for number, layer in enumerate(streamed.layers(0)):
            changed = {
                one: _changed(copies.get(one, own), other, paged)
                for one, other in variants_of(number, layer)
            }
            same = [copy for one, copy in copies.items() if one not in changed]
            _together(layer, [own, *same], paged)
            copies |= {
                one: copy
                for one, copy in changed.items()
                if one in copies or copy.is_moved_from(own.x)
            }
            advance(1)
        head = streamed.rest().head
        tried = [(one, Likelihood.of_states(copy.x, head, plain)) for one, copy in copies.items()]
        return cls(Likelihood.of_states(own.x, head, plain), tuple(tried))


@dataclass(frozen=True)
class _Copy:
    """Rows [T, d] of the texts, and the chunks that attention takes them in."""

    x: torch.Tensor
    chunks: Sequence[Chunk]

    def is_moved_from(self, own: torch.Tensor) -> bool:
        """True where rows differ visibly from those of the model as it is."""
        shares = (self.x - own).norm(dim=1) / own.norm(dim=1)
        return not float(shares.mean()) < LEAST_MOVED


def _changed(before: _Copy, layer: DecoderLayer, paged: PagedTexts) -> _Copy:
    """The rows behind another layer."""
    chunks = [Chunk(chunk.rows, chunk.layout) for chunk in before.chunks]
    for chunk, other in zip(chunks, before.chunks, strict=True):
        chunk.forward.choices.update(other.forward.choices)
    copy = _Copy(before.x.clone(), chunks)
    pass_through(layer, copy.x, paged, chunks)
    return copy


def _together(layer: DecoderLayer, copies: Sequence[_Copy], paged: PagedTexts) -> None:
    """Take the rows of all copies through a layer, in place: each attends by itself, then all go
    through the feed-forward together."""
    for copy in copies:
        cache = layer.new_cache(paged.pages.spec(copy.x.dtype, copy.x.device))
        for chunk in copy.chunks:
            copy.x[chunk.rows] = layer.attend(copy.x[chunk.rows], cache, chunk.forward)
    rows = torch.cat([copy.x for copy in copies])
    added = torch.split(layer.added(rows), len(copies[0].x))
    for copy, more in zip(copies, added, strict=True):
        copy.x.add_(more)
