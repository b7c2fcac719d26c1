"""Drafts with a second, smaller model of the same vocabulary.

It has a paged cache of its own. Tokens that it has not computed are computed when it next proposes,
so that a prompt, an accepted block and a recomputed request take the same path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.drafters.base import DrafterParts, Pass
from mtp_runtime.drafters.chain import Chain, ChainDrafter, grow
from mtp_runtime.request import Request


class ModelDrafter(ChainDrafter):
    """Runs the draft model over pages and a cache of its own, one sequence per request."""

    def __init__(self, parts: DrafterParts) -> None:
        """Raises UnsupportedError without a draft model, or with one of another vocabulary."""
        model, target = parts.draft_model, parts.target
        if model is None:
            raise UnsupportedError(
                "Method draft_model needs a second checkpoint", todo="Give one as draft_model"
            )
        if model.config.vocab != target.config.vocab:
            raise UnsupportedError(
                "The draft model has another vocabulary than the target",
                expected=target.config.vocab,
                found=model.config.vocab,
            )
        self._model = model
        config = parts.config
        self._pages = PageAllocator(
            parts.pages.pages,
            parts.pages.page_size,
            states=config.max_batch_size if model.config.state_elements else 0,
            drafts=config.speculation.draft_tokens,
        )
        self._cache = model.new_cache(self._pages)
        if parts.config.poison_freed:
            self._pages.poison_freed(self._cache)
        self._settings = parts.config.speculation
        self._sequences: dict[int, CachedSequence] = {}

    def observe(self, passes: Sequence[Pass]) -> None:
        """Cut off the tokens of rejected drafts."""
        for p in passes:
            sequence = self._sequences.get(p.request.request_id)
            if sequence is not None:
                self._pages.truncate(sequence, min(sequence.length, len(p.request.tokens) - 1))

    def grow(self, chains: list[Chain]) -> None:
        while chains:
            grow(chains, self._model.head, self._catch_up(chains), self._settings)
            chains = [chain for chain in chains if not chain.is_whole]

    def forget(self, request: Request) -> None:
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is not None:
            self._pages.truncate(sequence, 0)

    def _catch_up(self, chains: list[Chain]) -> torch.Tensor:
        """Compute all tokens not computed yet; returns the last rows [b, d] after the norm.

        States stand after a request's own tokens, so that every draft goes through them again.
        """
        sequences, spans, certain, tokens, last = [], [], [], [], []
        for chain in chains:
            request = chain.request
            sequence = self._sequences.setdefault(request.request_id, CachedSequence())
            if sequence.state is not None and chain.tokens:
                self._pages.truncate(sequence, len(request.tokens))
            known = request.tokens + chain.tokens
            start = sequence.length
            certain.append(len(request.tokens) - start)
            self._pages.append(sequence, len(known) - start)
            sequences.append(sequence)
            spans.append((start, len(known)))
            tokens += known[start:]
            last.append(len(tokens) - 1)
        device = self._model.device
        advanced = self._pages.advance(sequences, spans, certain)
        layout = lay_out(self._pages, sequences, spans, device, advanced)
        ids = torch.tensor(tokens, device=device)
        states = self._model(ids, self._cache, layout)
        return states.after[last]
