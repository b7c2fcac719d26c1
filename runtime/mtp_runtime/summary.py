"""Sums of the counts of several requests: acceptance per draft position, tokens per step, speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtp_runtime.request import RequestMetrics


@dataclass(frozen=True)
class PositionAcceptance:
    """Draft position j (from 1), over all blocks of all requests.

    verified: blocks that had a draft at j. reached: those of them in which all drafts before j were
    accepted. accepted: those in which j was too. conditional = accepted / reached,
    cumulative = accepted / verified; None where the denominator is 0.
    """

    position: int
    verified: int
    reached: int
    accepted: int
    conditional: float | None
    cumulative: float | None


@dataclass(frozen=True)
class Summary:
    """Totals of a run of several requests. A target step is one verified block."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    target_steps: int
    preemptions: int
    tokens_per_step: float
    elapsed_seconds: float
    tokens_per_second: float
    acceptance: tuple[PositionAcceptance, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(metrics: Sequence[RequestMetrics], elapsed_seconds: float) -> Summary:
    """Add up the counts of requests that took so long together."""
    output = sum(m.output_tokens for m in metrics)
    steps = sum(m.target_steps for m in metrics)
    return Summary(
        requests=len(metrics),
        prompt_tokens=sum(m.prompt_tokens for m in metrics),
        output_tokens=output,
        target_steps=steps,
        preemptions=sum(m.preemptions for m in metrics),
        tokens_per_step=output / max(1, steps),
        elapsed_seconds=elapsed_seconds,
        tokens_per_second=output / elapsed_seconds if elapsed_seconds else 0.0,
        acceptance=acceptance_of(metrics),
    )


def acceptance_of(metrics: Sequence[RequestMetrics]) -> tuple[PositionAcceptance, ...]:
    """Add up the acceptance of each draft position."""
    positions = max((len(m.drafted) for m in metrics), default=0)
    result = []
    for index in range(positions):
        having = [m for m in metrics if index < len(m.drafted)]
        verified = sum(m.drafted[index] for m in having)
        reached = sum(m.reached[index] for m in having)
        accepted = sum(m.accepted[index] for m in having)
        result.append(
            PositionAcceptance(
                position=index + 1,
                verified=verified,
                reached=reached,
                accepted=accepted,
                conditional=accepted / reached if reached else None,
                cumulative=accepted / verified if verified else None,
            )
        )
    return tuple(result)
