"""Bounds that verify holds the weights of a format to, and the export bugs that it undoes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RunGate:
    """The most that an export may differ from its source when both run on the same texts.

    kl_nats: mean divergence of the target's next-token distribution from the source's. top1: share
    of positions with the same best token. acceptance_points: loss of acceptance at any draft
    position, in percentage points.
    """

    kl_nats: float
    top1: float
    acceptance_points: float

    def or_looser(self, other: RunGate) -> RunGate:
        """The looser bound of both, field by field."""
        return RunGate(
            kl_nats=max(self.kl_nats, other.kl_nats),
            top1=min(self.top1, other.top1),
            acceptance_points=max(self.acceptance_points, other.acceptance_points),
        )


@dataclass(frozen=True)
class FormatGate:
    """Bounds of weights in one format.

    sqnr_db: the least signal-to-quantization-noise ratio of a weight matrix, in dB, whatever form
    the source has. run: what a model with weights in this format may lose.
    """

    sqnr_db: float
    run: RunGate


# fp8, int8 and int4 carry their own rounding noise alone: on Gaussian weights 31, 42 and 19 dB;
# blocks of ggml with five bits 32, with four 22 to 28.
# Damage (a scale of another block, codes in another order) leaves less than 10. Heavy tails cost a
# few dB, so each bound leaves room. bf16 rounds each weight once. Over seeds of prompts good int4
# bundles of the fixture reach a top-1 agreement of at least 0.939, with everything packed 0.915
# (docs/gates.md).
BF16_GATE = FormatGate(45.0, RunGate(kl_nats=0.005, top1=0.97, acceptance_points=1.0))
FP8_GATE = FormatGate(24.0, RunGate(kl_nats=0.02, top1=0.95, acceptance_points=1.0))
INT8_GATE = FormatGate(28.0, RunGate(kl_nats=0.005, top1=0.97, acceptance_points=1.0))
FIVE_BIT_GATE = FormatGate(20.0, RunGate(kl_nats=0.02, top1=0.94, acceptance_points=2.0))
FOUR_BIT_GATE = FormatGate(12.0, RunGate(kl_nats=0.05, top1=0.90, acceptance_points=3.0))


SWAPPED_PAIRS = "even and odd codes (the nibble order in a byte) are swapped"

# Codes and scales, of a stored weight and of the same with a bug undone.
Undo = Callable[["torch.Tensor", "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]


@dataclass(frozen=True)
class Bug:
    """A known bug of exporters: its sentence as the cause of a difference, and its undoing."""

    cause: str
    undo: Undo


def swapped_pairs() -> Bug:
    """Return the bug of packing codes of 4 bits into bytes."""

    def undo(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        changed = swapped(codes.contiguous().view(torch.uint8))
        return changed.view(codes.dtype), scale

    return Bug(SWAPPED_PAIRS, undo)


def swapped(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes with the two codes of each in the other order."""
    return (codes << 4) | (codes >> 4)


def shifted_exponents() -> tuple[Bug, Bug]:
    """Return the bugs of exponents that are one too small, or too large."""

    def times(factor: float) -> Undo:
        return lambda codes, scale: (codes, scale * factor)

    return (
        Bug("the exponents of its scales (e8m0) are one too small", times(2.0)),
        Bug("the exponents of its scales (e8m0) are one too large", times(0.5)),
    )


def packing_bugs(bits: int) -> tuple[Bug, ...]:
    """Return bugs of packing integer codes of 4 or 8 bits with an offset into words."""

    def recoded(change: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
        def undo(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            import torch

            changed = change(codes.contiguous().view(torch.uint8))
            return changed.view(codes.dtype), scale

        return undo

    def flipped(codes: torch.Tensor) -> torch.Tensor:
        """Flip each code's top bit: from offset to two's complement, or back."""
        return codes ^ (0x80 if bits == 8 else 0x88)

    def reversed_in_words(codes: torch.Tensor) -> torch.Tensor:
        """Put the codes of each 32-bit word in reverse order: most significant first."""
        in_bytes = codes if bits == 8 else swapped(codes)
        return in_bytes.view(len(codes), -1, 4).flip(2).reshape(len(codes), -1)

    offset = 1 << (bits - 1)
    return (
        Bug(
            f"the offset {offset} was dropped (or added) when its codes were packed",
            recoded(flipped),
        ),
        Bug(
            "the order of the codes in a word (nibble order) is reversed",
            recoded(reversed_in_words),
        ),
        Bug(SWAPPED_PAIRS, recoded(swapped)),
    )
