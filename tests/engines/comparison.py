"""vLLM's outputs held against our runtime's reading of them, and its log."""

from __future__ import annotations

import re

import torch
from engine_runs import Outputs, Reading

# Of log-probabilities: more between two engines in bf16 than all but 1 % of what was ever measured.
LARGEST_NOISE = 0.5
# By so much may the shares of accepted drafts differ on one text.
POINTS = 0.03
# What vLLM logs of weights that it misses, did not expect or left as they were.
COMPLAINTS = re.compile(
    r".*(not initialized|not found in params|unexpected|missing|uninitiali[sz]ed|ignor\w+ weight"
    r"|skipp\w+ weight|no weight).*",
    re.I,
)


def disagreements(outputs: Outputs, reading: Reading) -> tuple[list[float], list[float]]:
    """By how much the two differ where ours would have written another token; and where both would
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


def check_text(outputs: Outputs, reading: Reading) -> None:
    """Every token that ours would not have written is a tie: the engines' noise decides it."""
    differing, noise = disagreements(outputs, reading)
    most, typical = max(noise), torch.tensor(noise).quantile(0.99).item()
    print(
        f"{len(differing)} tokens differ, by up to {max(differing, default=0):.3f};"
        f" {len(noise)} agree, noise {typical:.3f} (99 %), {most:.3f} (most)"
    )
    assert typical < LARGEST_NOISE
    assert max(differing, default=0.0) <= most
    assert len(differing) < 0.1 * len(noise)


def check_acceptance(outputs: Outputs, reading: Reading) -> None:
    """Per position within 3 points, on the same text."""
    shown = ", ".join(share.shown() for share in reading.acceptance)
    print(
        f"vLLM {[round(a, 3) for a in outputs.acceptance]}, ours {shown}, {outputs.blocks} blocks"
    )
    for theirs, ours in zip(outputs.acceptance, reading.acceptance, strict=True):
        assert abs(theirs - ours.value) <= POINTS


def check_log(log: str) -> None:
    """No word of a weight."""
    assert not [line for line in log.splitlines() if COMPLAINTS.match(line)]
