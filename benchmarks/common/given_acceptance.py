"""Drafts accepted at given rates, whatever the target takes: their speed can then be measured with
random weights, of which next to no draft would be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.acceptance.base import AcceptanceRule, Block, Verdict
from mtp_runtime.sampling import Choices

NAME = "given rates"


def accept_at(rates: Sequence[float]) -> str:
    """Add a rule for greedy requests that accepts the first drafts of a step at these rates, each
    that of all drafts up to it; return its name. llama.cpp's --spec-synth-rates are the same."""
    random = Random(0)

    def accept_greedy(drafts: Sequence[int], best: Sequence[int]) -> Verdict:
        drawn = random.random()
        accepted = sum(drawn < rate for rate in rates[: len(drafts)])
        return Verdict(accepted, best[accepted])

    ACCEPTANCE_RULES[NAME] = AcceptanceRule(_refuse, accept_greedy=accept_greedy)
    return NAME


def _refuse(block: Block, choices: Choices) -> Verdict:
    raise AssertionError("requests of this benchmark are greedy")
