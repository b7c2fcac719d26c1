"""Drafts with the model's own MTP module, by recursion beyond the first token.

Its cache lies beside the target's, in the same pages. It is refreshed: rows whose target hidden
state became known are computed with it, over the slots that a recursion left there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_export.errors import UnsupportedError
from mtp_runtime.acceptance import Draft
from mtp_runtime.drafters.base import DrafterParts, Pass
from mtp_runtime.drafters.chain import Chain, extend
from mtp_runtime.layout import lay_out, page_table
from mtp_runtime.models.deepseek_v3 import Recursion
from mtp_runtime.request import Request


class MtpDrafter:
    """Holds the MTP output of each request's last row between observing and proposing."""

    def __init__(self, parts: DrafterParts) -> None:
        if parts.target.mtp is None:
            raise UnsupportedError(
                "This model was loaded without an MTP module",
                expected="a bundle with main and mtp, or a checkpoint with layer "
                f"{parts.target.config.layers}",
                todo="Use --speculate-method none or inference_with_reference",
            )
        self._module = parts.target.mtp
        self._cache = parts.cache
        self._layer_cache = parts.cache.layers[parts.target.cache_layers - 1 :]
        self._device = parts.target.device
        self._sample = parts.config.speculation.sample_drafts
        self._last: dict[int, torch.Tensor] = {}  # request id -> MTP output [d], before the norm

    @classmethod
    def build(cls, parts: DrafterParts) -> MtpDrafter:
        return cls(parts)

    def observe(self, passes: Sequence[Pass]) -> None:
        """Refresh: rows with the target's hidden states, each with the token after it."""
        if not passes:
            return
        spans = [(p.start, p.start + len(p.hidden)) for p in passes]
        tokens = [
            token
            for p, (start, end) in zip(passes, spans, strict=True)
            for token in p.request.tokens[start + 1 : end + 1]
        ]
        hidden = torch.cat([p.hidden for p in passes])
        out = self._run([p.request for p in passes], spans, tokens, hidden)
        row = -1
        for p in passes:
            row += len(p.hidden)
            self._last[p.request.request_id] = out[row]

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        chains = [Chain(r, count) for r, count in zip(requests, counts, strict=True)]
        growing = [chain for chain in chains if chain.count > 0]
        if growing:
            self._grow(growing)
        return [chain.draft() for chain in chains]

    def forget(self, request: Request) -> None:
        self._last.pop(request.request_id, None)

    def _grow(self, chains: list[Chain]) -> None:
        """Every chain to its count; greedy ones in one call where the module has one."""
        recursion = self._module.recursion
        greedy = [chain for chain in chains if chain.request.params.greedy]
        if recursion is not None and any(chain.count > 1 for chain in greedy):
            self._grow_at_once(greedy, recursion)
            chains = [chain for chain in chains if not chain.request.params.greedy]
        if chains:
            self._grow_by_steps(chains)

    def _grow_at_once(self, chains: list[Chain], recursion: Recursion) -> None:
        """Draft the best tokens of all chains."""
        chains = sorted(chains, key=lambda chain: -chain.count)
        requests, counts = [chain.request for chain in chains], [chain.count for chain in chains]
        x = torch.stack([self._last[request.request_id] for request in requests])
        starts = [len(request.tokens) - 2 for request in requests]
        for request, start, count in zip(requests, starts, counts, strict=True):
            missing = self._cache.missing_pages(request.cached, start + count)
            assert not missing, "drafts have no place in the cache"
        table = page_table([request.cached for request in requests], self._device)
        drafts = recursion(x, starts, counts, table, self._layer_cache)
        for chain, tokens in zip(chains, drafts, strict=True):
            chain.tokens += tokens

    def _grow_by_steps(self, chains: list[Chain]) -> None:
        """Draft one token a chain and round; a chain that has enough leaves."""
        x = torch.stack([self._last[chain.request.request_id] for chain in chains])
        while True:
            normed = self._module.head.normed(x)
            extend(chains, self._module.head.logits(normed), self._sample)
            staying = [i for i, chain in enumerate(chains) if len(chain.tokens) < chain.count]
            if not staying:
                return
            recycled = self._module.recycled(x, normed)
            if len(staying) < len(chains):
                recycled = recycled[staying]
                chains = [chains[i] for i in staying]
            requests = [chain.request for chain in chains]
            # The last row that observe ran is the one before the last token.
            starts = [len(c.request.tokens) - 2 + len(c.tokens) for c in chains]
            spans = [(start, start + 1) for start in starts]
            x = self._run(requests, spans, [c.tokens[-1] for c in chains], recycled)

    def _run(
        self,
        requests: Sequence[Request],
        spans: Sequence[tuple[int, int]],
        tokens: Sequence[int],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        layout = lay_out(self._cache, [r.cached for r in requests], spans, self._device)
        next_tokens = torch.tensor(tokens, device=self._device)
        return self._module(next_tokens, hidden, self._layer_cache, layout)
