"""The texts that run-level checks share: prompts with what the bundle's own model makes of them
under plain greedy decoding, and its hidden states at every token of them, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mtp_export.verify.decode import Decoded, decode
from mtp_export.verify.prompts import Prompt
from mtp_runtime.models.deepseek_v3 import DeepseekV3, MtpModule
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.teacher import (
    Anchors,
    Recycle,
    Text,
    Texts,
    draft_states,
    logits_by_chunk,
    target_states,
)

# Prompts of one token leave nothing for a drafter to see.
_SHORTEST = 2


@dataclass(frozen=True)
class Drafts:
    """What an MTP module drafts at every anchor, by depth: best token and how it fared.

    best [A], hit [A] (it is the text's token), room [A] (the text goes that far), scores [A] (the
    module's log-probability of the text's token) and margins [A] (its best logit less the second).
    """

    best: tuple[torch.Tensor, ...]
    hit: tuple[torch.Tensor, ...]
    room: tuple[torch.Tensor, ...]
    scores: tuple[torch.Tensor, ...]
    margins: tuple[torch.Tensor, ...]

    def stands(self, depth: int) -> torch.Tensor:
        """Where every draft up to the depth is right [A]; depth 0: everywhere."""
        result = torch.ones_like(self.room[0])
        for hit in self.hit[:depth]:
            result = result & hit
        return result


@dataclass
class Corpus:
    """Texts of a model; each figure is computed when it is first asked for."""

    model: DeepseekV3
    prompts: tuple[Prompt, ...]
    new_tokens: int
    given: Texts | None = None
    given_states: tuple[torch.Tensor, torch.Tensor] | None = None
    _decoded: dict[int, Decoded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = tuple(p for p in self.prompts if len(p) >= _SHORTEST) or self.prompts

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.new_tokens)

    @property
    def module(self) -> MtpModule:
        assert self.model.mtp is not None, "a bundle with an mtp part"
        return self.model.mtp

    @cached_property
    def plain(self) -> Decoded:
        """Plain greedy decoding of all prompts together."""
        return decode(self.model, self.prompts, self.params)

    def speculative(self, k: int) -> Decoded:
        """Greedy decoding with k drafts of the MTP module."""
        if k not in self._decoded:
            self._decoded[k] = decode(self.model, self.prompts, self.params, method="mtp", k=k)
        return self._decoded[k]

    @cached_property
    def texts(self) -> Texts:
        if self.given is not None:
            return self.given
        return texts_of(self.plain)

    @cached_property
    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, d] before and after the last norm."""
        if self.given_states is not None:
            return self.given_states
        with torch.inference_mode():
            return target_states(self.model, self.texts)

    @property
    def hidden(self) -> torch.Tensor:
        """What the module takes of the target [T, d]."""
        return self.model.mtp_input(*self.states)

    @cached_property
    def anchors(self) -> Anchors:
        return self.texts.anchors()

    @torch.inference_mode()
    def drafts(
        self,
        depths: int,
        module: MtpModule | None = None,
        hidden: torch.Tensor | None = None,
        recycle: Recycle | None = None,
    ) -> Drafts:
        """What a module, the corpus's own by default, drafts at every anchor."""
        module = module or self.module
        states = self.draft_outputs(depths, module, hidden, recycle)
        return judge(module, self.texts, self.anchors, states)

    @torch.inference_mode()
    def draft_outputs(
        self,
        depths: int,
        module: MtpModule | None = None,
        hidden: torch.Tensor | None = None,
        recycle: Recycle | None = None,
    ) -> list[torch.Tensor]:
        """MTP output [A, d] before the norm, of each depth."""
        hidden = self.hidden if hidden is None else hidden
        module = module or self.module
        return draft_states(self.model, module, self.texts, hidden, self.anchors, depths, recycle)

    def by_text(self, values: torch.Tensor, where: torch.Tensor) -> list[float]:
        """Sums of values [A] over the anchors of each text, where the mask holds."""
        sums = torch.zeros(len(self.texts.texts), dtype=torch.float64)
        sums.index_add_(0, self.anchors.owners[where], values[where].double())
        return [float(value) for value in sums]


def texts_of(decoded: Decoded) -> Texts:
    """Prompts and outputs of a run."""
    return Texts(tuple(Text(tuple(r.tokens), len(r.prompt)) for r in decoded.requests))


def judge(
    module: MtpModule, texts: Texts, anchors: Anchors, states: Sequence[torch.Tensor]
) -> Drafts:
    """Best tokens and log-probabilities of MTP outputs, by depth."""
    best, hits, rooms, scores, margins = [], [], [], [], []
    tokens = texts.tokens
    for depth, x in enumerate(states, start=1):
        room = texts.room(anchors, depth)
        wanted = tokens[(anchors.rows + 1 + depth).clamp(max=len(tokens) - 1)]
        normed = module.head.normed(x)
        found, margin = best_with_margin(module, normed)
        best.append(found)
        margins.append(margin)
        hits.append((found == wanted) & room)
        rooms.append(room)
        scores.append(scores_of(module, normed, wanted))
    return Drafts(tuple(best), tuple(hits), tuple(rooms), tuple(scores), tuple(margins))


def best_with_margin(module: MtpModule, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row, and its logit less the second's [A]."""
    tops = [logits.topk(2, dim=-1) for _, logits in logits_by_chunk(module.head, normed)]
    if not tops:
        return torch.zeros(0, dtype=torch.long), torch.zeros(0)
    values = torch.cat([top[0] for top in tops]).cpu()
    return torch.cat([top[1] for top in tops])[:, 0].cpu(), values[:, 0] - values[:, 1]


def scores_of(module: MtpModule, normed: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Log-probability of each wanted token [A]."""
    parts = [
        logits.log_softmax(dim=-1).gather(1, wanted[rows].to(logits.device)[:, None])[:, 0].cpu()
        for rows, logits in logits_by_chunk(module.head, normed)
    ]
    return torch.cat(parts) if parts else torch.zeros(0)
