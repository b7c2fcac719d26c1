"""Controls are skipped only where check acceptance fails: every module is tested by one of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from mtp_export.progress import ShowCount, uncounted
from mtp_export.verify.check import Item, Status
from mtp_export.verify.decoding import controls
from mtp_export.verify.decoding.acceptance import first_draft, is_in_band
from mtp_export.verify.decoding.controls import Control
from mtp_export.verify.evidence.corpus import Corpus, Drafts

PER_TEXT = 100


@dataclass(frozen=True)
class Drafted:
    """Drafts of a module in texts of PER_TEXT tokens each, of which some are accepted in each."""

    accepted: Sequence[int]
    show_count: ShowCount = uncounted

    def drafts(self, depths: int) -> Drafts:
        hit = torch.tensor([n < count for count in self.accepted for n in range(PER_TEXT)])
        each = (hit,) * depths
        room = (torch.ones_like(hit),) * depths
        return Drafts(best=each, hit=each, room=room, scores=each)

    def by_text(self, values: torch.Tensor, where: torch.Tensor) -> list[float]:
        return [float(v) for v in (values.double() * where).view(-1, PER_TEXT).sum(1)]


def controlled(accepted: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Item, bool]:
    """Return the item of a control that spoils nothing, and whether acceptance is in the band."""
    corpus = cast(Corpus, Drafted(accepted))
    same = Control("one that spoils nothing", corpus.drafts(1), depth=1, cause="it is not used")
    monkeypatch.setattr(controls, "_controls", lambda corpus: iter([same]))
    (item,) = controls.items_of(corpus)
    found = first_draft(corpus)
    assert found is not None
    return item, is_in_band(found)


@pytest.mark.parametrize("accepted", [[30, 60] * 5, [49, 50] * 5, [40, 50] * 5])
def test_a_low_acceptance_is_controlled_unless_its_own_check_fails(
    accepted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where check acceptance passes, nothing else finds a module that ignores its input."""
    item, is_in_band = controlled(accepted, monkeypatch)
    assert sum(accepted) < PER_TEXT / 2 * len(accepted)
    skipped = item.status is Status.NOT_TESTED
    assert item.status is Status.FAIL if is_in_band else skipped
    assert skipped is ("check acceptance says why" in item.cause)


def test_both_sides_of_the_band_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same mean, by how the texts scatter."""
    assert controlled([30, 60] * 5, monkeypatch)[1]
    item, is_in_band = controlled([44, 46] * 5, monkeypatch)
    assert not is_in_band and "only 0.45 of the drafts are accepted" in item.cause
