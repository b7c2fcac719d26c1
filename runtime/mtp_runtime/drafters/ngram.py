"""n-gram lookup (inference_with_reference): proposes what followed the same tokens earlier.

Source: PaddleNLP's speculative decoding; Saxena, Prompt Lookup Decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.request import Request


class NgramDrafter(Drafter):
    """Looks the last n tokens up in the prompt, then in the output, for the longest n found."""

    def __init__(self, parts: DrafterParts) -> None:
        self._max_ngram_size = parts.config.speculation.max_ngram_size

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        return [
            Draft(self._look_up(request, count))
            for request, count in zip(requests, counts, strict=True)
        ]

    def _look_up(self, request: Request, count: int) -> tuple[int, ...]:
        tokens, prompt_size = request.tokens, len(request.prompt)
        for size in range(min(self._max_ngram_size, len(tokens) - 1), 0, -1):
            last = len(tokens) - size  # the n-gram itself must not be found
            for first, end in ((0, prompt_size), (prompt_size, last)):
                at = find_last(tokens, tokens[last:], first, min(end, last))
                if at is not None and count:
                    return tuple(tokens[at + size : at + size + count])
        return ()


def find_last(tokens: Sequence[int], ngram: Sequence[int], first: int, end: int) -> int | None:
    """Return the last start in [first, end) of the n-gram, None if it does not occur."""
    size, head = len(ngram), ngram[0]
    for at in range(end - 1, first - 1, -1):
        if tokens[at] == head and tokens[at : at + size] == ngram:
            return at
    return None
