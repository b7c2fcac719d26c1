"""Tokens of another device or dtype, compared with a CPU's as far as rounding lets them agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtp_runtime import RequestOutput

TOP = 20  # logprobs that the CPU's outputs need
# How much less likely than the CPU's token another one may be by rounding alone, in nats. Sums in
# another order move a logit of the fixture by 1e-4 in float32, and bfloat16 one by up to 0.8; its
# closest two choices are 0.013 apart.
SLACK = {"float32": 0.005, "bfloat16": 1.0}


def departures(
    found: Sequence[RequestOutput], wanted: Sequence[RequestOutput]
) -> list[tuple[int, int, float]]:
    """Prompt and place at which outputs leave the CPU's, and how much less likely the CPU finds
    what stands there, in nats. What follows is another text."""
    left = []
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert 0 < len(ours.token_ids) <= len(theirs.logprobs)
        pairs = enumerate(zip(ours.token_ids, theirs.logprobs, strict=False))
        for place, (token, given) in pairs:
            if token != given.token:
                gap = given.logprob - dict(given.top).get(token, -math.inf)
                left.append((number, place, gap))
                break
    return left


def check(found: Sequence[RequestOutput], wanted: Sequence[RequestOutput], dtype: str) -> None:
    """A token may be another than the CPU's where rounding can have decided, and nowhere else."""
    assert [one for one in departures(found, wanted) if one[2] > SLACK[dtype]] == []
