"""Groups of rows, what a step computes for each of its requests; and verdicts on drafts: what the
target's logits say of every group that reaches its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.acceptance.base import AcceptanceRule, Block, Draft, Verdict
from mtp_runtime.config import SpeculationConfig
from mtp_runtime.logprobs import token_logprobs
from mtp_runtime.models.execution import Head
from mtp_runtime.request import Request


@dataclass(frozen=True)
class Group:
    """Rows of one request in a step: its tokens [start, end), then its drafts."""

    request: Request
    start: int
    end: int
    draft: Draft

    @property
    def decides(self) -> bool:
        """True where the rows reach the last token, so that a new one follows."""
        return self.end == len(self.request.tokens)

    @property
    def rows(self) -> int:
        return self.end - self.start + len(self.draft.tokens)

    @property
    def is_decoding(self) -> bool:
        """True where one token and its drafts are computed, and nothing of a prompt before it."""
        return self.decides and self.end - self.start == 1


@dataclass(frozen=True)
class Judge:
    """Judges drafts by the head of a target, under the acceptance rule of the settings."""

    head: Head
    settings: SpeculationConfig

    @property
    def rule(self) -> AcceptanceRule:
        return ACCEPTANCE_RULES[self.settings.acceptance]

    def verdicts(self, groups: Sequence[Group], after: torch.Tensor) -> list[Verdict | None]:
        """Return a verdict for every group whose rows reach the last token, None for others, and
        for a request that fails.

        after [T, d] are the rows of all groups, after the last norm.
        """
        needed: list[int] = []
        row = 0
        for group in groups:
            row += group.rows
            if group.decides:
                needed += range(row - 1 - len(group.draft.tokens), row)
        if not needed:
            return [None] * len(groups)
        normed = after[needed]
        if any(self._reads_logits(group) for group in groups if group.decides):
            logits = self.head.logits(normed)
            best = logits.argmax(dim=-1).tolist()
        else:
            logits, best = normed[:, :0], self.head.best(normed).tolist()
        verdicts: list[Verdict | None] = []
        row = 0
        for group in groups:
            if not group.decides:
                verdicts.append(None)
                continue
            end = row + len(group.draft.tokens) + 1
            verdicts.append(self._try_verdict(group, logits[row:end], best[row:end]))
            row = end
        return verdicts

    def _try_verdict(self, group: Group, logits: torch.Tensor, best: list[int]) -> Verdict | None:
        """Judge one request's drafts as _verdict does; an error ends that request alone."""
        try:
            return self._verdict(group, logits, best)
        except Exception as error:
            group.request.fail(error)
            return None

    def decide(self, group: Group, logits: torch.Tensor, best: list[int]) -> Verdict:
        """Judge one request's drafts by logits [n+1, vocab] and the best token of each row."""
        rule, params = self.rule, group.request.params
        if rule.accept_greedy is not None and params.greedy:
            return rule.accept_greedy(group.draft.tokens, best)
        target_probs = rule.distribution(logits.cpu().numpy(), params)
        block = Block(group.draft, target_probs, params, self.settings)
        return rule.accept(block, group.request.choices)

    def _reads_logits(self, group: Group) -> bool:
        """Return True for a request that takes more of its rows' logits than the best tokens."""
        params, made = group.request.params, group.request.metrics.output_tokens
        best_alone = params.greedy and self.rule.accept_greedy is not None
        return not best_alone or params.min_tokens > made or params.logprobs is not None

    def _verdict(self, group: Group, logits: torch.Tensor, best: list[int]) -> Verdict:
        """Judge one request's drafts by logits [n+1, vocab] and the best token of each row, with
        what the request wants besides: no early end, and log-probabilities."""
        request, given = group.request, logits
        early = request.params.min_tokens - request.metrics.output_tokens
        if early > 0:
            logits = logits.clone()
            ends = [token for token in request.end_token_ids if token < logits.shape[-1]]
            logits[:early, ends] = -torch.inf
            best = logits.argmax(dim=-1).tolist()
        verdict = self.decide(group, logits, best)
        count = request.params.logprobs
        if count is None:
            return verdict
        tokens = (*group.draft.tokens[: verdict.accepted], verdict.last)
        return replace(verdict, logprobs=token_logprobs(given[: len(tokens)], tokens, count))


def score_prompts(groups: Sequence[Group], after: torch.Tensor, head: Head) -> None:
    """Note the log-probabilities of prompts whose requests want them, once for each token.

    after [T, d] are the rows of all groups, after the last norm.
    """
    row = 0
    for group in groups:
        request, count = group.request, group.request.params.prompt_logprobs
        scored = len(request.prompt_logprobs)
        end = min(group.end, len(request.prompt) - 1)
        if count is not None and scored < end:
            rows = after[row + scored - group.start : row + end - group.start]
            tokens = request.prompt[scored + 1 : end + 1]
            request.prompt_logprobs += token_logprobs(head.logits(rows), tokens, count)
        row += group.rows
