"""Drafts with the model's own MTP modules: draft i by module i, then the last one by recursion.

Their caches lie beside the target's, in the same pages. Rows whose inputs have become known, the
target's hidden states and the tokens that were accepted, are computed anew over what drafting left
there. Module m lags m rows behind the target, since its row takes a token m places further on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from mtp_checkpoints.errors import UnsupportedError
from mtp_kernels.decoder import Recursion
from mtp_runtime.cache import Cache, lay_out, page_table
from mtp_runtime.drafters.base import DrafterParts, Pass
from mtp_runtime.drafters.chain import Chain, ChainDrafter, grow, take_best
from mtp_runtime.models.compiled import stacked
from mtp_runtime.models.execution import DraftModule
from mtp_runtime.request import Request

Span = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """Rows [start, end) of one request for a module, the token of each, and what they are fed."""

    request: Request
    span: Span
    tokens: Sequence[int]
    hidden: torch.Tensor  # [rows, d]


class ModuleDrafter(ChainDrafter):
    """Drafts by modules whose caches lie in the target's pages.

    Holds each module's output at its last row of each request, between observing and proposing.
    """

    def __init__(
        self, parts: DrafterParts, modules: Sequence[DraftModule], caches: Sequence[Cache]
    ) -> None:
        self._modules, self._caches = modules, caches
        self._pages = parts.pages
        self._device = parts.target.device
        self._settings = parts.config.speculation
        # Request id -> each module's output [d] before the norm, None where it has no row yet.
        self._last: dict[int, list[torch.Tensor | None]] = {}

    def _fed(self, passes: Sequence[Pass]) -> Sequence[torch.Tensor]:
        """Return the states [s, d] that the first module takes of each pass."""
        return [p.hidden for p in passes]

    def observe(self, passes: Sequence[Pass]) -> None:
        """Compute the rows whose inputs have become known, module by module."""
        if not passes:
            return
        fed = zip(passes, self._fed(passes), strict=True)
        rows = [_known_rows(p.request, 0, p.start, hidden) for p, hidden in fed]
        for depth, module in enumerate(self._modules):
            following: list[Rows] = []
            for part, out in zip(rows, self._run(depth, rows), strict=True):
                last = self._last_outputs(part.request)
                if depth + 1 < len(self._modules):
                    following.append(
                        _rows_behind(module, depth, rows=part, before=last[depth], out=out)
                    )
                if len(out):
                    last[depth] = out[-1]
            rows = following

    def forget(self, request: Request) -> None:
        self._last.pop(request.request_id, None)

    def grow(self, chains: list[Chain]) -> None:
        """Grow every chain to its count; greedy ones in one call where there is one."""
        greedy = [chain for chain in chains if chain.request.params.greedy]
        at_once = len(self._modules) == 1 and take_best(greedy, self._settings)
        recursion = self._modules[0].recursion if at_once else None
        if recursion is not None and any(chain.count > 1 for chain in greedy):
            self._grow_at_once(greedy, recursion)
            chains = [chain for chain in chains if not chain.request.params.greedy]
        if chains:
            self._grow_by_steps(chains)

    def _grow_at_once(self, chains: list[Chain], recursion: Recursion) -> None:
        """Draft the best tokens of all chains by recursion of one module."""
        chains = sorted(chains, key=lambda chain: -chain.count)
        requests, counts = [chain.request for chain in chains], [chain.count for chain in chains]
        x = torch.cat([self._first_output(request) for request in requests])
        starts = [len(request.tokens) - 2 for request in requests]
        for request, start, count in zip(requests, starts, counts, strict=True):
            missing = self._pages.missing_pages(request.cached, start + count)
            assert not missing, "drafts have no place in the cache"
        table = page_table([request.cached for request in requests], self._device)
        cache = stacked(self._caches[0])
        drafts = recursion(x, starts=starts, counts=counts, page_table=table, kv_cache=cache)
        for chain, tokens in zip(chains, drafts, strict=True):
            chain.tokens += tokens

    def _grow_by_steps(self, chains: list[Chain]) -> None:
        """Draft one token per chain and round; a chain that has enough leaves."""
        outputs = [self._first_output(chain.request) for chain in chains]
        depth = 0  # of the drafts that these outputs give
        while True:
            module, sizes = self._module(depth), [len(out) for out in outputs]
            x = torch.cat(outputs)
            normed = module.head.normed(x)
            ends = [end - 1 for end in accumulate(sizes)]
            last = normed if len(x) == len(chains) else normed[ends]
            grow(chains, module.head, last, self._settings)
            staying = [i for i, chain in enumerate(chains) if not chain.is_whole]
            if not staying:
                return
            hidden = torch.split(module.recycled(x, normed), sizes)
            rows = [self._rows_to_draft(depth, chains[i], hidden[i]) for i in staying]
            chains = [chains[i] for i in staying]
            depth += 1
            outputs = self._run(depth, rows)
            if depth + 1 < len(self._modules):
                outputs = [
                    self._with_known_row(depth, chain.request, out)
                    for chain, out in zip(chains, outputs, strict=True)
                ]
            else:
                outputs = [out[-1:] for out in outputs]

    def _rows_to_draft(self, depth: int, chain: Chain, hidden: torch.Tensor) -> Rows:
        """Return the rows that the next draft takes: of the next module those up to the last row
        that the target has computed, of the last module once more one row further on."""
        count, tokens = len(hidden), chain.request.tokens
        again = max(0, depth + 2 - len(self._modules))
        end = len(tokens) - 1 + again
        fed = (tokens[-count:] + chain.tokens)[-count:]
        return Rows(chain.request, (end - count, end), fed, hidden)

    def _with_known_row(self, depth: int, request: Request, out: torch.Tensor) -> torch.Tensor:
        """Put a module's output at the last row that observe ran before that at drafted rows."""
        last = self._last_outputs(request)[depth]
        return out if last is None else torch.cat([last[None], out])

    def _first_output(self, request: Request) -> torch.Tensor:
        """Return the first module's output [1, d] at the row before the last token."""
        last = self._last_outputs(request)[0]
        assert last is not None, "requests are observed before they draft"
        return last[None]

    def _last_outputs(self, request: Request) -> list[torch.Tensor | None]:
        if request.request_id not in self._last:
            self._last[request.request_id] = [None] * len(self._modules)
        return self._last[request.request_id]

    def _module(self, depth: int) -> DraftModule:
        """Return the module of the draft at a depth, from 0."""
        return self._modules[min(depth, len(self._modules) - 1)]

    def _run(self, depth: int, rows: Sequence[Rows]) -> list[torch.Tensor]:
        """Run the module of a depth; returns its output [rows, d] before the norm for each."""
        filled = [part for part in rows if len(part.hidden)]
        if not filled:
            return [part.hidden for part in rows]
        sequences, spans = [part.request.cached for part in filled], [part.span for part in filled]
        layout = lay_out(self._pages, sequences, spans, self._device)
        tokens = torch.tensor([t for part in filled for t in part.tokens], device=self._device)
        hidden = torch.cat([part.hidden for part in filled])
        cache = self._caches[min(depth, len(self._modules) - 1)]
        out = self._module(depth)(tokens, hidden, cache, layout)
        return list(torch.split(out, [len(part.hidden) for part in rows]))


class MtpDrafter(ModuleDrafter):
    """Drafts by the MTP modules that were loaded with the target."""

    def __init__(self, parts: DrafterParts) -> None:
        if not parts.target.mtp_modules:
            raise UnsupportedError(
                "This model was loaded without an MTP module",
                expected="a bundle with main and mtp, or a checkpoint with layer "
                f"{parts.target.config.layers}",
                todo="Use --speculate-method none or inference_with_reference",
            )
        super().__init__(parts, parts.target.mtp_modules, parts.cache.mtp)


def _known_rows(request: Request, depth: int, start: int, hidden: torch.Tensor) -> Rows:
    """Return the rows from start on for the module of a depth, fed with committed tokens."""
    end = start + len(hidden)
    tokens = request.tokens[start + depth + 1 : end + depth + 1]
    return Rows(request, (start, end), tokens, hidden)


def _rows_behind(
    module: DraftModule, depth: int, rows: Rows, before: torch.Tensor | None, out: torch.Tensor
) -> Rows:
    """Return the next module's rows, one behind those of this one: fed its output at the row before
    them, if there is one, and at all of them but the last."""
    x = out if before is None else torch.cat([before[None], out])
    start, end = (max(0, row - 1) for row in rows.span)
    x = x[: end - start]
    hidden = module.recycled(x, module.head.normed(x))
    return _known_rows(rows.request, depth + 1, start, hidden)
