"""vLLM's outputs compared with our runtime's on the same text, and its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from engine_runs import Outputs, Reading

from mtp_export.verify.evidence.statistics import Estimate

# Of log-probabilities: more between two engines in bf16 than all but 1 % of what was ever measured.
LARGEST_NOISE = 0.5
# A tie between two experts may fall differently, and then moves a few tokens by more: by at most
# half of this in all that was ever measured.
LARGEST_OF_A_ROUTERS_TIE = 2.0
# By so much may the shares of accepted drafts differ on one text.
POINTS = 0.03
# What vLLM logs of weights that it misses, did not expect or left as they were.
COMPLAINTS = re.compile(
    r".*(not initialized|not found in params|unexpected|missing|uninitiali[sz]ed|ignor\w+ weight"
    r"|skipp\w+ weight|no weight).*",
    re.I,
)


def disagreements(outputs: Outputs, reading: Reading) -> tuple[list[float], list[float]]:
    """Differences of the two where ours would have written another token; and where both would
    write the same, the noise, of the margin between vLLM's best two."""
    differing: list[float] = []
    noise: list[float] = []
    for tokens, steps, rows in zip(outputs.tokens, outputs.logprobs, reading.logits, strict=True):
        for token, step, row in zip(tokens, steps, rows, strict=True):
            ours = torch.log_softmax(row, -1)
            best = int(ours.argmax())
            second = next(other for other in step if other != token)
            if best == token:
                theirs = step[token] - step[second]
                noise.append(abs(theirs - float(ours[token] - ours[second])))
            else:  # where vLLM does not even name our best, its margin is above that to its second
                theirs = step[token] - step.get(best, step[second])
                differing.append(float(ours[best] - ours[token]) + theirs)
    return differing, noise


@dataclass(frozen=True)
class Comparison:
    """Measurements of one run: differing and noise as `disagreements` has them; per draft
    position the share of accepted drafts, vLLM's by its own counters, over `blocks` blocks."""

    differing: list[float]
    noise: list[float]
    theirs: list[float]
    ours: list[Estimate]
    blocks: int

    @property
    def typical_noise(self) -> float:
        return torch.tensor(self.noise).quantile(0.99).item()

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": len(self.differing) + len(self.noise),
            "tokens_that_differ": len(self.differing),
            "largest_difference": max(self.differing, default=0.0),
            "noise_99_percent": self.typical_noise,
            "noise_largest": max(self.noise),
            "blocks": self.blocks,
            "vllm": self.theirs,
            "ours": [share.as_json() for share in self.ours],
        }


def compare(outputs: Outputs, reading: Reading) -> Comparison:
    differing, noise = disagreements(outputs, reading)
    return Comparison(differing, noise, outputs.acceptance, reading.acceptance, outputs.blocks)


def check_text(measured: Comparison) -> None:
    """Every token that ours would not have written is a tie: the engines' noise decides it."""
    assert measured.typical_noise < LARGEST_NOISE
    assert max(measured.differing + measured.noise) <= LARGEST_OF_A_ROUTERS_TIE
    assert len(measured.differing) < 0.1 * len(measured.noise)


def check_acceptance(measured: Comparison) -> None:
    """Per position within 3 points, on the same text."""
    for theirs, ours in zip(measured.theirs, measured.ours, strict=True):
        assert abs(theirs - ours.value) <= POINTS


def check_log(log: str) -> None:
    """Find no message about a weight in the log."""
    assert not [line for line in log.splitlines() if COMPLAINTS.match(line)]
