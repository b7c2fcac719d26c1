"""Groups of rows: what one step computes for each of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_runtime.acceptance.base import Draft
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
