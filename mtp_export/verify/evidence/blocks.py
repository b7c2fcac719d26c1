"""Blocks of drafts that an engine would have verified while it generated given texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_export.verify.evidence.corpus import Drafts
from mtp_export.verify.evidence.statistics import Estimate, ratio
from mtp_runtime.teacher_forcing import Anchors, Texts


@dataclass(frozen=True)
class Blocks:
    """Counts by text: steps of the target and, for each draft position, blocks in which all drafts
    before it were accepted, and those in which it was too."""

    steps: Sequence[int]
    reached: Sequence[Sequence[int]]
    accepted: Sequence[Sequence[int]]

    @property
    def conditional(self) -> list[Estimate | None]:
        """Acceptance at each position, given that all before were accepted."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [ratio(accepted, reached) for accepted, reached in pairs]

    @property
    def tokens_per_step(self) -> Estimate | None:
        """Tokens of a step, the target's own included."""
        tokens = [sum(counts) for counts in zip(self.steps, *self.accepted, strict=True)]
        return ratio(tokens, self.steps)


def walked(texts: Texts, anchors: Anchors, drafts: Drafts, k: int) -> Blocks:
    """Count the blocks of k drafts along the generated end of each text."""
    at = {int(row): index for index, row in enumerate(anchors.rows)}
    hits = [hit.tolist() for hit in drafts.hit[:k]]
    steps = [0] * len(texts.texts)
    reached = [[0] * len(texts.texts) for _ in range(k)]
    accepted = [[0] * len(texts.texts) for _ in range(k)]
    for owner, (start, text) in enumerate(zip(texts.starts, texts.texts, strict=True)):
        last, end = text.prompt_size, len(text.tokens) - 1
        while last < end:
            steps[owner] += 1
            accepted_here = 0
            for depth in range(min(k, end - last - 1)):
                reached[depth][owner] += 1
                if not hits[depth][at[start + last - 1]]:
                    break
                accepted[depth][owner] += 1
                accepted_here += 1
            last += accepted_here + 1
    return Blocks(steps, reached, accepted)
