"""Changes that make text likelier by as much explain a fault equally, however sure a difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch

from mtp_export.verify.decoding.changed import Changed, explained
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import PlainTexts
from mtp_export.verify.evidence.statistics import Estimate
from mtp_runtime.teacher_forcing import Texts


@dataclass(frozen=True)
class Found:
    """A likelihood whose gains over others are known to a ten-thousandth of a nat."""

    nats: float
    unsure: float = 1e-4

    def fitted_gain(self, other: Found, confidence: float) -> Estimate:
        gain = other.nats - self.nats
        return Estimate(gain, gain - self.unsure, gain + self.unsure, 2369)


def changed(name: str, nats: float, *, is_trained: bool = False) -> Changed:
    under = cast(Likelihood, Found(nats))
    variant = LayerVariant(
        2, f"{name} is negated", f"{name} has the wrong sign", is_trained=is_trained
    )
    return Changed(variant, under, Estimate(nats, nats - 0.2, nats + 0.2, 2369))


@pytest.mark.parametrize(("other", "is_as_good"), [(2.684, True), (2.65, False)])
def test_what_gains_a_hundredth_less_is_named_too(other: float, is_as_good: bool) -> None:
    tried = [changed("v_proj", 2.687), changed("o_proj", other)]
    item = explained("no layer does harm", tried, tried, "none")
    told = "several explain it equally: v_proj has the wrong sign; or o_proj has the wrong sign"
    assert (told in item.cause) is is_as_good


@pytest.mark.parametrize(
    ("gained", "is_size", "is_as_good"),
    [(0.3, False, True), (0.2, False, False), (0.2, True, True)],
)
def test_what_is_trained_is_named_too_where_it_gains_half_as_much(
    gained: float, is_size: bool, is_as_good: bool
) -> None:
    """Training gives a share back of what an undone change does; a size makes up for damage."""
    best = changed("v_proj", 0.5)
    best = replace(best, variant=replace(best.variant, is_size=is_size))
    tried = [best, changed("o_proj", gained, is_trained=True)]
    item = explained("no layer does harm", tried, tried, "none")
    assert ("o_proj has the wrong sign" in item.cause) is is_as_good


def test_a_change_that_is_found_in_two_ways_is_named_once() -> None:
    """Both do the same to every text, whatever they are called."""
    tried = [changed("v_proj", 2.687), changed("the values", 2.687), changed("o_proj", 2.686)]
    ways = [replace(one, under=cast(Likelihood, Found(one.gain.value, 0.0))) for one in tried]
    item = explained("no layer does harm", ways, ways, "none")
    assert "v_proj has the wrong sign; or o_proj has the wrong sign" in item.cause
    assert item.data["equal_causes"] == 2


@pytest.mark.parametrize("is_of_tensor", [True, False])
def test_two_of_which_either_may_be_wrong_are_both_named(is_of_tensor: bool) -> None:
    """Values and o_proj, of which one is negated, do the same to every text; a half does too."""
    tried = [changed("v_proj", 2.687), changed("o_proj", 2.687)]
    found = [
        replace(
            one,
            under=cast(Likelihood, Found(one.gain.value, 0.0)),
            variant=replace(one.variant, is_of_tensor=is_of_tensor or one is tried[1]),
        )
        for one in tried
    ]
    item = explained("no layer does harm", found, found, "none")
    assert "v_proj has the wrong sign; or o_proj has the wrong sign" in item.cause


def test_halves_that_are_trained_together_are_both_named() -> None:
    """They have the texts under one model, and differ in what is lost without each."""
    under = cast(Likelihood, Found(2.0, 0.0))
    tried = [changed(name, lost, is_trained=True) for name, lost in (("a", 0.02), ("b", 0.015))]
    found = [replace(one, under=under) for one in tried]
    item = explained("no layer does harm", found, found, "none")
    assert "a has the wrong sign; or b has the wrong sign" in item.cause


@pytest.mark.parametrize(("gained", "is_as_good"), [(0.009, True), (0.001, False)])
def test_a_share_of_training_is_compared_with_what_is_undone_on_other_texts(
    gained: float, is_as_good: bool
) -> None:
    """By intervals: there are more of those that parts are trained together on."""
    tried = []
    for name, nats, texts in (("the norm", 0.011, 96), ("gate_proj", gained, 48)):
        sums = torch.zeros(texts, 3, dtype=torch.float64)
        counts, states = torch.full((texts,), 127), torch.zeros(0, 4)
        under = Likelihood(PlainTexts(Texts(()), ()), sums, counts, states)
        variant = changed(name, nats, is_trained=texts == 96).variant
        tried.append(Changed(variant, under, Estimate(nats, nats - 0.004, nats + 0.004, 127)))
    item = explained("no part gains", tried, tried, "none")
    assert "the norm has the wrong sign" in item.cause
    assert ("gate_proj has the wrong sign" in item.cause) is is_as_good
