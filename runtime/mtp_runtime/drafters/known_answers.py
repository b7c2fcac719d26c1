"""Drafter that knows the answers and is wrong on purpose: for tests and for measuring costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import Drafter
from mtp_runtime.request import Request


class KnownAnswersDrafter(Drafter):
    """Replays known continuations, each token of them right at a rate.

    answers: prompt to the output of plain decoding. rate 1 is always right, rate 0 never;
    right_for m makes drafts wrong from position m (from 0) of a block on.
    """

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        vocab: int,
        rate: float = 1.0,
        right_for: int | None = None,
        seed: int = 0,
    ) -> None:
        self._answers = answers
        self._vocab = vocab
        self._rate = rate
        self._right_for = right_for
        self._random = np.random.Generator(np.random.Philox(seed))

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        return [
            Draft(self._replay(request, count))
            for request, count in zip(requests, counts, strict=True)
        ]

    def _replay(self, request: Request, count: int) -> tuple[int, ...]:
        done = request.metrics.output_tokens
        answer = self._answers[request.prompt][done : done + count]
        limit = len(answer) if self._right_for is None else self._right_for
        return tuple(
            token
            if position < limit and self._random.random() < self._rate
            else (token + 1) % self._vocab
            for position, token in enumerate(answer)
        )
