"""Causes of a tensor, behind its name, that plain text is likelier without."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_export.verify.diagnosis.causes import decoding

TRANSPOSED = "is transposed"
INPUTS_DO_HARM = (
    "does harm: its weights are damaged or in another order, or the whole MTP layer is another main"
    " model's, whose hidden states it expects"
)


def knows_no_text(noun: str, own: float, frequencies: float) -> str:
    """noun: the MTP layer. own, frequencies: nats per token by which plain text is less likely than
    certain, under the layer and by how often its tokens come."""
    return (
        f"{noun} predicts plain text worse than the frequencies of its tokens do ({own:.1f} nats"
        f" per token; {frequencies:.1f}), and so it does with any one change undone or part"
        " trained: the whole layer is another main model's, whose hidden states it expects, or was"
        " never trained, or eh_proj, which all of it is fed by, is damaged"
    )


def ordered(clause: str) -> str:
    """clause: on the order of its rows, columns or elements."""
    return f"is not as it was trained: {clause}"


def part_times(noun: str, first: int, last: int, factor: float) -> str:
    """noun: row, column or element. factor: that of the stored weights over the right ones."""
    where = f"its {noun}s {first} to {last}"
    return f"is off in part: {where} are about {factor:.2g} times what they should be"


def adapted(rank: int) -> str:
    what = f"holds a part of rank {rank} that does harm"
    return f"{what}, as of an adapter (LoRA) that was merged into it"


def mended_in_part(harm: str, explained: Sequence[str]) -> str:
    """harm: on a half of the MTP layer. explained: on changes of it, each of which mends some."""
    some = decoding.first_of([one for one in explained if one != harm])
    return f"{harm}; no change that was tried puts it right, and these in part: {some}"
