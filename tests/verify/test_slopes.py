"""Slopes of plain text's loss: they point back to what a tensor was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import export, nightly_but
from faults import planting
from mtp_export.verify.decoding.changed import compared
from mtp_export.verify.diagnosis.slopes import Undone, of_matrix, of_vector, pointed, sureness
from mtp_export.verify.diagnosis.tensor_variants import Place, rate_of
from mtp_export.verify.diagnosis.trainable import Spot, Trainable
from mtp_export.verify.diagnosis.trainable_module import TrainableModule
from mtp_export.verify.diagnosis.trained import Trials, holding
from mtp_export.verify.evidence.plain_text import JUDGING, TRAINING, PlainTexts
from mtp_export.verify.gates import LEAST_POINTED_NATS
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "glm4-moe-tiny"
SHARED = "model.layers.%d.mlp.shared_experts.%s.weight"


def interleaved(values: Tensor, parts: int) -> Tensor:
    return values.view(parts, -1, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


def in_part(values: Tensor, first: int, last: int, factor: float) -> Tensor:
    other = values.clone()
    other[first:last] *= factor
    return other


def adapted(values: Tensor, rank: int, share: float) -> Tensor:
    chance = torch.Generator().manual_seed(3)
    left, right = (torch.randn(size, rank, generator=chance) for size in values.shape)
    added = left @ right.t()
    size = values.float().square().mean().sqrt() / added.square().mean().sqrt()
    return values + added * share * size


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (torch.neg, "has the wrong sign"),
        (lambda w: w.flip(0), "has its rows in reverse order"),
        (lambda w: w.flip(1), "has its columns in reverse order"),
        (lambda w: w.roll(5, 0), "its rows are rolled by 5"),
        (lambda w: w.roll(24, 1), "has the halves of its columns exchanged"),
        (partial(interleaved, parts=4), "come by turns from 4 equal parts"),
        (lambda w: interleaved(w.t(), 12).t(), "its columns are de-interleaved: every 4th"),
        (lambda w: w[torch.arange(64).view(8, 8)[[0, 6, 2, 3, 4, 5, 1, 7]].flatten()],
         "in blocks of 8 rows, its blocks 1 and 6 are exchanged"),
        (lambda w: w.t().reshape(w.shape), "is transposed"),
        (partial(in_part, first=20, last=40, factor=4.0),
         "its rows 20 to 39 are about 4 times what they should be"),
        (lambda w: in_part(w.t(), 6, 20, 0.5).t(),
         "its columns 6 to 19 are about 0.5 times what they should be"),
        (partial(adapted, rank=3, share=1.5), "holds a part of rank 3"),
    ],
)  # fmt: skip
def test_the_slope_points_back(change: Callable[[Tensor], Tensor], wrong: str) -> None:
    """To what a matrix was, of which the squared distance is the loss."""
    good = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    values = change(good)
    found = surest(of_matrix(values, values - good), values, values - good)
    best = min(found, key=lambda one: float((one.values - good).norm()))
    assert wrong in best.wrong
    if "rank" not in wrong:
        torch.testing.assert_close(best.values, good)


def test_the_slope_points_back_to_a_vector() -> None:
    good = torch.randn(64, generator=torch.Generator().manual_seed(1))
    for values, wrong in ((good + 1, "1 too much"), (good.roll(-9), "rolled by -9")):
        best = surest(of_vector(values, values - good), values, values - good)[0]
        assert wrong in best.wrong
        torch.testing.assert_close(best.values, good)


def surest(found: Iterable[Undone], values: Tensor, slope: Tensor) -> list[Undone]:
    """Those that the slope points to most surely: ways of one direction equally."""
    tried = [(sureness(slope, one.values - values), one) for one in found]
    most = max(sure for sure, _ in tried)
    return [one for sure, one in tried if sure > 0.999 * most]


INTERLEAVED = (
    partial(interleaved, parts=4),
    ["gate_proj", "layer 1"],
    "come by turns from 4 equal parts",
)


@pytest.mark.parametrize(
    ("change", "names", "wrong"),
    nightly_but(
        [INTERLEAVED],
        [
            (None, [], ""),
            INTERLEAVED,
            (lambda w: w.t().reshape(w.shape), ["up_proj", "layer 1"], "is transposed"),
            (None, ["layer 1", "layer 2"], "in each other's place"),
        ],
    ),
)
def test_text_is_likelier_with_what_slopes_point_to(
    change: Callable[..., Tensor] | None, names: list[str], wrong: str, tmp_path: Path
) -> None:
    """And it holds what it held then; nothing is likelier of a good model."""
    bundle = tmp_path / "bundle"
    assert export(FOLDER, bundle, "--link", "copy", "--quiet").code == 0
    if change is not None:
        planting.change(bundle / "main", SHARED % (1, names[0]), change)
    elif names:
        planting.swap(bundle / "main", *(SHARED % (layer, "up_proj") for layer in (1, 2)))
    trials = trials_of(open_streamed(bundle, "cpu"), bundle)
    parts = [leaf for spot in trials.model.spots() for leaf, _ in spot.parts]
    before = [leaf.clone() for leaf in parts]
    found = compared(trials.own, pointed(trials))
    assert all(map(torch.equal, before, parts))
    assert bool(wrong) is any(one.gains(LEAST_POINTED_NATS) for one in found)
    if wrong:
        assert wrong in found[0].variant.cause
        assert all(name in found[0].variant.cause for name in names)


@pytest.mark.nightly  # takes text through a model, and through its module a hundred times
def test_slopes_lead_past_a_module_that_is_too_certain(tmp_path: Path) -> None:
    """Plain text is likeliest at another temperature, and what makes it less certain is no way to
    what is wrong, nor is a norm that is: neither the slopes nor the first texts show that."""
    bundle = tmp_path / "bundle"
    assert export(FOLDER, bundle, "--link", "copy", "--quiet").code == 0
    norm = "model.layers.3.shared_head.norm.weight"
    planting.change(bundle / "mtp", norm, partial(in_part, first=55, last=88, factor=1.87))
    streamed = open_streamed(bundle, "cpu")
    trials = trials_of(streamed, bundle).of_module(TrainableModule.of(streamed))
    best = compared(trials.own, pointed(trials))[0]
    assert trials.temperature > 1.5 and best.gains(LEAST_POINTED_NATS)
    assert "head of the MTP layer is off in part: its elements 5" in best.variant.cause


def test_two_tensors_are_in_each_others_place_while_they_are_tried() -> None:
    """Though the values of one are where the other's are put."""
    held = torch.arange(12.0).view(3, 4)
    before = held.clone()
    one, other = (
        Spot(0, "", Place("", ()), ((held, (slice(None), slice(first, first + 2))),))
        for first in (0, 2)
    )
    with holding([(one, other.values()), (other, one.values())]):
        assert held.equal(before.roll(2, 1))
    assert held.equal(before)


@pytest.mark.parametrize(
    ("place", "offset", "read"),
    [(Place("A_log", (), is_rate=True), 0.0, rate_of), (Place("norm", ()), 1.0, lambda w: 1 + w)],
    ids=["rates", "1 + w"],
)
def test_values_and_slopes_are_those_of_what_is_stored(
    place: Place, offset: float, read: Callable[[Tensor], Tensor]
) -> None:
    stored = torch.randn(8, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    held = read(stored)
    (of_stored,) = torch.autograd.grad(held.pow(3).sum(), stored)
    held, stored = held.detach(), stored.detach()
    spot = Spot(0, "", place, ((held, (slice(None),)),), offset)
    torch.testing.assert_close(spot.values(), stored)
    torch.testing.assert_close(spot.slope(lambda part: 3 * part.square()), of_stored)
    with holding([(spot, -stored)]):
        torch.testing.assert_close(held, read(-stored))
    torch.testing.assert_close(held, read(stored), rtol=0, atol=0)


def trials_of(streamed: StreamedModel, bundle: Path) -> Trials:
    tokenizer = Tokenizer.find(bundle / "main")
    texts = (PlainTexts.of_modules(tokenizer, some[:6], 4) for some in (TRAINING, JUDGING))
    return Trials.of(Trainable.of(streamed), *texts)
