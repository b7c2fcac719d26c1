"""Drafters that know the answer, and are wrong on purpose: for tests and for measuring costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mtp_runtime.acceptance import Draft
from mtp_runtime.drafters.base import Pass
from mtp_runtime.request import Request


class PlantedDrafter:
    """Replays known continuations: each draft is right at a rate, at most `right_for` in a row.

    answers: prompt -> the output that plain decoding gives. rate 1 is always right, rate 0 never,
    right_for m right for the first m positions of a block and wrong from there.
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

    def observe(self, passes: Sequence[Pass]) -> None:
        return

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        return [
            Draft(self._plant(request, count))
            for request, count in zip(requests, counts, strict=True)
        ]

    def forget(self, request: Request) -> None:
        return

    def _plant(self, request: Request, count: int) -> tuple[int, ...]:
        done = request.metrics.output_tokens
        answer = self._answers[request.prompt][done : done + count]
        limit = len(answer) if self._right_for is None else self._right_for
        return tuple(
            token
            if position < limit and self._random.random() < self._rate
            else (token + 1) % self._vocab
            for position, token in enumerate(answer)
        )
