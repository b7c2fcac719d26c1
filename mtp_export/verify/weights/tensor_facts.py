"""Statistics of a weight's values and codes, as the ledger judges them without any reference."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.weights.weight_values import WeightOnDisk
from mtp_export.verify.diagnosis.causes import weights as causes
from mtp_export.verify.evidence.weight_facts import WeightFacts


@dataclass(frozen=True)
class TensorFacts:
    """Statistics of one weight.

    error: why the values cannot be decoded (a NaN code, a negative scale), else "". digest: of the
    stored codes. constant: all values are equal. outer_share: share of codes in the outer halves of
    their range, None for other than integer codes. blocks, full_blocks: fp8 blocks that are not all
    zero, and those that reach the largest code. power_of_two_scales: every fp8 scale is one.
    """

    weight: WeightOnDisk
    digest: str
    error: str = ""
    constant: bool = False
    rms: float = 0.0
    outer_share: float | None = None
    blocks: int = 0
    full_blocks: int = 0
    power_of_two_scales: bool = False

    @classmethod
    def of(cls, facts: WeightFacts) -> TensorFacts:
        """Return what a pass over a weight found; one that is unsound has no other figures."""
        found, weight = facts.statistics, facts.weight
        if not found.is_sound:
            return cls(weight, facts.digest, error=_why_unsound(weight))
        integer = weight.stored.format.code_offset is not None
        return cls(
            weight,
            facts.digest,
            constant=found.is_constant,
            rms=found.root_mean_square,
            outer_share=found.outer_codes / max(1, found.elements) if integer else None,
            blocks=found.blocks,
            full_blocks=found.full_blocks,
            power_of_two_scales=found.power_of_two_scales and found.blocks > 0,
        )


def _why_unsound(weight: WeightOnDisk) -> str:
    """Find the first piece that has no finite values, by dequantizing."""
    for start, stop in weight.pieces():
        try:
            wrong = ~weight.encoded(start, stop).dequantize().isfinite()
        except ValueError as error:
            return causes.not_decodable(start, stop - 1, error)
        if wrong.any():
            return causes.not_finite(int(wrong.sum()), start)
    raise AssertionError(f"{weight.name}: its statistics are unsound, its values are not")
