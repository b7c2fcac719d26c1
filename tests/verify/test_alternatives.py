"""Variants that explain a low acceptance: those by which more drafts are accepted."""

from __future__ import annotations

import pytest
import torch

from mtp_export.verify.diagnosis.alternatives import Alternative
from mtp_export.verify.evidence.statistics import Estimate
from mtp_runtime.drafters.base import ScoredVariant

NOTHING = torch.zeros(0)
EXCHANGED = ScoredVariant("experts", "two are exchanged", "they are swapped", NOTHING, NOTHING)


@pytest.mark.parametrize(
    ("own", "other", "helps"),
    [
        (0.0, 0.0, False),
        (0.01, 0.05, False),  # still by chance
        (0.3, 0.3, False),
        (0.3, 0.29, False),
        (0.3, 0.34, False),  # of a module that drafts badly for another reason
        (0.3, 0.8, True),
        (0.7, 0.72, True),
        (None, None, True),  # of a draft whose acceptance was not measured
    ],
)
def test_experts_are_to_blame_where_acceptance_rises(
    own: float | None, other: float | None, helps: bool
) -> None:
    gain = Estimate(value=0.5, low=0.4, high=0.6, count=100)
    found = Alternative(EXCHANGED, gain, own=own, other=other)
    assert found.better and found.helps is helps
