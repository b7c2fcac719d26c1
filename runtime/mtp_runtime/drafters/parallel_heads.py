"""Drafts with parallel heads: all from the last row that the target has computed of a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.parallel_heads import Body
from mtp_runtime.cache import lay_out
from mtp_runtime.drafters.base import DrafterParts, ForcedTexts, Pass, ScoredVariant, TargetDraft
from mtp_runtime.drafters.chain import Chain, ChainDrafter, extend, take_best
from mtp_runtime.loading.draft_folder import read_draft
from mtp_runtime.models.load import Loaded
from mtp_runtime.models.parallel_heads import FfnHeads, LayerHeads, StoredHeads
from mtp_runtime.request import Request
from mtp_runtime.teacher_forcing import WORST_SCORE, PagedTexts, model_states, through_layer

_ROWS = 512  # whose logits are computed at a time


class ParallelHeadsDrafter(ChainDrafter):
    """Holds the output of every head's body at each request's last row.

    Heads that are layers attend to all rows, and have caches in the target's pages.
    """

    def __init__(self, parts: DrafterParts, heads: FfnHeads | LayerHeads | None = None) -> None:
        """Raises UnsupportedError without heads."""
        if heads is None:
            raise UnsupportedError(
                "Method parallel_heads needs a draft of heads",
                todo="Give its folder as draft_model",
            )
        self._heads, self._pages = heads, parts.pages
        self._device, self._settings = parts.target.device, parts.config.speculation
        self._bodies: dict[int, torch.Tensor] = {}  # request id -> [k, d]
        if isinstance(heads, LayerHeads):
            self._cache = heads.new_cache(parts.pages)
            if parts.config.poison_freed:
                parts.pages.poison_freed(self._cache)

    def observe(self, passes: Sequence[Pass]) -> None:
        """Run the bodies over rows that were computed."""
        passes = [p for p in passes if len(p.hidden)]
        if not passes:
            return
        if isinstance(self._heads, LayerHeads):
            bodies = self._over_all_rows(self._heads, passes)
        else:
            bodies = self._heads.bodies(torch.stack([p.hidden[-1] for p in passes]))
        for index, p in enumerate(passes):
            self._bodies[p.request.request_id] = bodies[:, index]

    def grow(self, chains: list[Chain]) -> None:
        for chain in chains:
            chain.count = min(chain.count, len(self._heads))
        deepest = max(chain.count for chain in chains)
        by_request = [self._bodies[chain.request.request_id][:deepest] for chain in chains]
        bodies = torch.stack(by_request, dim=1)  # [k, b, d]
        if take_best(chains, self._settings):
            for chain, tokens in zip(chains, self._heads.best(bodies).T.tolist(), strict=True):
                chain.tokens += tokens[: chain.count]
            return
        for logits in self._heads.logits(bodies):
            rows = [i for i, chain in enumerate(chains) if not chain.is_whole]
            if rows:
                extend([chains[i] for i in rows], logits[rows], self._settings)

    def forget(self, request: Request) -> None:
        self._bodies.pop(request.request_id, None)

    def _over_all_rows(self, heads: LayerHeads, passes: Sequence[Pass]) -> torch.Tensor:
        """Return each body's output [k, b, d] at the last row of each pass."""
        spans, taps = [], []
        for p in passes:
            assert p.taps is not None, "the target is tapped for its draft"
            spans.append((p.start, p.start + len(p.hidden)))
            taps.append(p.taps)
        sequences = [p.request.cached for p in passes]
        layout = lay_out(self._pages, sequences, spans, self._device)
        ends = layout.cu_q[1:].long() - 1
        return heads.bodies(torch.cat(taps), self._cache, layout)[:, ends]


def read_parallel_heads(folder: Path, loaded: Loaded) -> TargetDraft:
    """Read a draft's folder, for a target.

    Raises InvalidInputError for a tensor of no known layout, and for heads that are incomplete, or
    of another target.
    """
    draft = read_draft(folder)
    stored = StoredHeads.of(draft, loaded.model, loaded.parallel)
    heads: FfnHeads | LayerHeads
    if stored.layout.body is Body.LAYER:
        heads = stored.layers(loaded.model, loaded.folder)
        taps: tuple[int, ...] = (loaded.model.config.layers - 1,)
    else:
        heads, taps = stored.ffn(loaded.model), ()
    build = partial(ParallelHeadsDrafter, heads=heads)
    return TargetDraft(
        build,
        weights=heads,
        tensors=len(stored.tensors),
        taps=taps,
        variants=partial(_variants, heads=heads, taps=taps),
    )


def toy(parts: DrafterParts) -> ParallelHeadsDrafter:
    """Build a drafter of two heads without bodies, that of the target's MTP module each."""
    head = parts.target.mtp_modules[0].head
    return ParallelHeadsDrafter(parts, FfnHeads(((), ()), (head,)))


def _variants(
    texts: ForcedTexts, heads: FfnHeads | LayerHeads, taps: tuple[int, ...]
) -> Iterator[ScoredVariant]:
    """Yield the draft with two heads exchanged, for every pair."""
    bodies = _bodies(texts, heads, taps)  # [k, A, d]
    last, rows = len(texts.choices) - 1, texts.everywhere.rows
    scores = torch.stack(
        [
            _head_scores(heads, bodies, texts.choices[(rows + depth).clamp(max=last)])
            for depth in range(1, len(heads) + 1)
        ]
    )  # [depth, head, A]
    for a, b in combinations(range(len(heads)), 2):
        yield ScoredVariant(
            "heads",
            change=f"heads {a} and {b} are exchanged",
            cause=f"heads {a} and {b} are swapped",
            scores=scores[a, b] + scores[b, a],
            before=scores[a, a] + scores[b, b],
            depth=b + 1,
        )


def _bodies(
    texts: ForcedTexts, heads: FfnHeads | LayerHeads, taps: tuple[int, ...]
) -> torch.Tensor:
    """Return the output of every head's body at every anchor [k, A, d]."""
    rows = texts.everywhere.rows
    if isinstance(heads, FfnHeads):
        return heads.bodies(texts.states[1][rows])
    model = texts.model.tapped(taps)
    states = model_states(model, texts.texts)
    assert states.taps is not None, "the model is tapped"
    paged = PagedTexts.of(texts.texts)
    chunks = paged.chunks(model.device)
    return torch.stack(
        [through_layer(layer, states.taps, paged.pages, chunks)[rows] for layer in heads.layers]
    )


def _head_scores(
    heads: FfnHeads | LayerHeads, bodies: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Return the log-probability [k, A] of a token [A] by every head."""
    scores = []
    parts = zip(torch.split(bodies, _ROWS, dim=1), torch.split(chosen, _ROWS), strict=True)
    for part, tokens in parts:
        ids = tokens.to(part.device)[None, :, None].expand(len(heads), -1, 1)
        scores.append(heads.logits(part).log_softmax(dim=-1).gather(2, ids)[..., 0].cpu())
    return torch.cat(scores, dim=1).clamp(min=WORST_SCORE)
