"""Controls are skipped only where check acceptance fails: every module is tested by one of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from mtp_export.progress import ShowCount, uncounted
from mtp_export.verify.check import MTP_MODULE, Item, Status, failed
from mtp_export.verify.decoding import controls
from mtp_export.verify.decoding.acceptance import first_draft, is_in_band, loaded_wrongly
from mtp_export.verify.decoding.controls import Control
from mtp_export.verify.evidence.corpus import Corpus, Drafts
from mtp_runtime.layers.norm import RmsNorm

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


def test_no_contract_is_blamed_for_a_module_that_is_loaded_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other side of a norm may be better for it; other controls fail all the same."""
    corpus, better = cast(Corpus, Drafted([40, 60] * 5)), Drafted([60, 80] * 5).drafts(1)
    norm = RmsNorm(torch.tensor([0.5, 1.0, 2.0]), 1e-6)
    names = {"other side": norm, "shifted": None}
    spoilt = [Control(n, better, 1, "a cause", one) for n, one in names.items()]
    monkeypatch.setattr(controls, "_controls", lambda corpus: iter(spoilt))
    found_by = loaded_wrongly(
        [failed("sanity band of draft 1", "low", subject=MTP_MODULE),
         failed("no other layout drafts better", "a half is scaled", subject=MTP_MODULE)]
    )  # fmt: skip
    assert [item.status for item in controls.items_of(corpus)] == [Status.FAIL] * 2
    side, shifted = controls.items_of(corpus, found_by)
    assert (side.status, shifted.status) == (Status.NOT_TESTED, Status.FAIL)
    assert "loaded wrongly, as item 'no other layout drafts better' says" in side.cause
    of_contract = failed("no other layout drafts better", "before the norm")
    assert loaded_wrongly([of_contract]) == ""
