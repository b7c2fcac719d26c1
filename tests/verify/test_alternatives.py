"""Variants that explain a low acceptance: those by which more drafts are accepted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_export.verify.check import Item, failed
from mtp_export.verify.decoding import acceptance, differential
from mtp_export.verify.decoding.acceptance import one_cause
from mtp_export.verify.decoding.changed import Changed
from mtp_export.verify.diagnosis.alternatives import CONFIDENCE, Alternative, Gain, best_of
from mtp_export.verify.diagnosis.causes.pointed import mended_in_part
from mtp_export.verify.diagnosis.layer_variants import LayerVariant
from mtp_export.verify.diagnosis.trainable_module import changed_half, harm_of
from mtp_export.verify.diagnosis.variants import Variant
from mtp_export.verify.evidence.statistics import Estimate, ratio
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


@pytest.mark.parametrize(("other", "more"), [(0.12, True), (0.8, False)])
def test_a_change_that_leaves_most_drafts_refused_is_not_all_that_is_wrong(
    other: float, more: bool
) -> None:
    module: Any = None  # which the sentence does not look at
    variant = Variant("half", "a half is divided by 4", "it is 4 times too large", module, False)
    gain = Estimate(value=0.5, low=0.4, high=0.6, count=100)
    found = Alternative(variant, gain, own=0.07, other=other)
    assert found.explained.startswith(f"loading: acceptance rises from 0.07 to {other:.2f} when")
    assert ("or it is another main model's module" in found.explained) is more


def explaining(change: str, sums: tuple[float, ...]) -> Alternative:
    """An exchange that gains so much on each of some texts of ten drafts, and has all accepted."""
    counts = (10.0,) * len(sums)
    found = ratio(sums, counts, CONFIDENCE)
    assert found is not None
    gain = Gain(**vars(found), sums=sums, counts=counts)
    return Alternative(replace(EXCHANGED, change=change), gain, own=0.3, other=0.9)


def test_what_explains_as_well_is_told_with_the_best() -> None:
    """By the same drafts, text by text: intervals that overlap do not make two equal."""
    best = explaining("best", (20.0, 30.0, 25.0, 35.0))
    equal = explaining("equal", (22.0, 27.0, 26.0, 33.0))
    less = explaining("less", (17.0, 27.0, 22.0, 31.0))
    none = explaining("none", (1.0, -1.0, 0.5, -0.6))
    assert less.gain.high is not None and best.gain.low is not None
    assert less.gain.high > best.gain.low
    found = best_of([best, equal, less, none])
    assert [one.variant.change for one in found] == ["best", "equal"]
    assert best_of([none]) == []
    assert best_of([best, replace(less, gain=Estimate(1.9, 0.5, 3.0, 40))]) != [best]


def test_a_half_that_is_better_left_out_comes_first() -> None:
    """Where nothing else explains it better, which may be so by chance."""
    module: Any = None  # which the order does not look at
    best = explaining("best", (20.0, 30.0, 25.0, 35.0))
    out = replace(explaining("out", (22.0, 27.0, 26.0, 33.0)), other=0.9)
    out = replace(out, variant=Variant("out", "out", "", module, False, is_left_out=True))
    assert [one.variant.change for one in best_of([best, out])] == ["out", "best"]
    less = replace(out, gain=explaining("less", (17.0, 27.0, 22.0, 31.0)).gain)
    assert best_of([best, less]) == [best]


def test_what_betters_first_drafts_is_named_alone() -> None:
    """Later ones are fed what is wrong with them."""
    first = explaining("first", (20.0, 30.0, 25.0, 35.0))
    second = explaining("second", (40.0, 60.0, 50.0, 70.0))
    later = replace(second, variant=replace(EXCHANGED, change="second", depth=2))
    assert best_of([later, first]) == [first]
    assert best_of([later]) == [later]


@pytest.mark.parametrize(
    ("crossed", "cause"),
    [
        (9, "precision: the MTP part loses it, 0.60 against the 0.90 of the source's module"),
        (6, "the main part: layer 3"),
    ],
)
def test_a_loss_is_that_of_the_part_which_makes_it(
    crossed: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's module on this main model has its drafts accepted, or loses as many."""
    hits = {"source": crossed, "export": 6}
    monkeypatch.setattr(
        differential, "_hits", lambda corpus, main, own: [(torch.arange(10) < hits[own]).double()]
    )
    texts = SimpleNamespace(room=lambda anchors, depth: slice(None))
    pair: Any = SimpleNamespace(
        corpus=SimpleNamespace(texts=texts, anchors=None),
        source=SimpleNamespace(model="source"),
        export=SimpleNamespace(model="export"),
        where_it_starts=lambda: "layer 3",
    )
    change = Estimate(value=-0.3, low=-0.4, high=-0.2, count=10)
    assert differential._losing_part(pair, change, depth=1).startswith(cause)


@pytest.mark.parametrize(
    ("others", "says_so"),
    [((0.62, 0.61), True), ((0.62, 0.9), False), ((0.62,), False)],
)
def test_several_changes_that_leave_most_drafts_refused_may_be_of_another_model(
    others: tuple[float, ...], says_so: bool
) -> None:
    """A part that restores most of the acceptance is the fault, and one alone is named."""
    module: Any = None  # which the sentence does not look at
    variant = Variant("half", "a half is divided by 4", "it is 4 times too large", module, False)
    gain = Estimate(value=0.5, low=0.4, high=0.6, count=100)
    found = [Alternative(variant, gain, own=0.55, other=other) for other in others]
    assert ("taken from another main model" in one_cause(found)) is says_so


def of_half(wrong: str, *, half: str = "attention", is_size: bool = False) -> Alternative:
    """A change of half a module that leaves most drafts refused."""
    module: Any = None  # which the sentence does not look at
    variant = Variant(wrong, wrong, f"q_norm {wrong}", module, False, by_acceptance=is_size)
    gain = Estimate(value=0.5, low=0.4, high=0.6, count=100)
    return Alternative(replace(variant, wrong=wrong), gain, own=0.6, other=0.64, half=half)


HARM = "the attention of the MTP layer does harm: its weights are damaged"


@pytest.mark.parametrize(
    ("others", "harm"),
    [
        ([of_half("is reversed")], True),
        ([of_half("is reversed", half="inputs")], False),
        ([of_half("has the wrong sign")], False),  # as the first
        ([replace(of_half("is reversed"), other=0.9)], False),
        ([], False),
    ],
)
def test_changes_of_a_half_that_contradict_each_other_name_the_half(
    others: list[Alternative], harm: bool
) -> None:
    """Those that mend some of it are told behind that."""
    words = one_cause([of_half("has the wrong sign"), *others])
    assert words.startswith(HARM) is harm
    assert "q_norm has the wrong sign" in words


@pytest.mark.parametrize("half", ["attention", "inputs"])
def test_a_half_that_does_harm_is_named_once(half: str) -> None:
    """Though training of it is among what mends some."""
    words = mended_in_part(harm_of(half), [harm_of(half), "hnorm is reversed"])
    assert words.count("does harm") == 1 and words.endswith("in part: hnorm is reversed")
    assert ("another main model's" in words) is (half == "inputs")


def weighed(better: list[Alternative], trained: list[Changed]) -> Item:
    """A failure whose explanations are compared with what training of the module betters."""
    context: Any = SimpleNamespace(module_damage=False)
    failure = failed("drafts", one_cause(better), figure="", bound="none", subject="module")
    changes = [Changed(one.as_of_layer, TEXTS, one.gain) for one in better]
    every = sorted([*changes, *trained], key=lambda one: -one.gain.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "beside_in_module", lambda context, modules: every)
        return acceptance._beside_training(failure, better, context)


TEXTS: Any = SimpleNamespace(fitted_gain=lambda other, confidence: None)


def gaining(gain: float, words: str, **kind: bool) -> Changed:
    variant = LayerVariant(0, words, words, "attention", **kind)
    return Changed(variant, TEXTS, Estimate(gain, gain - 0.01, gain + 0.01, 100))


def test_training_names_what_the_drafts_do_not() -> None:
    """The best by the likelihood of code; nothing else where all that is best was known."""
    two = [of_half("has the wrong sign"), of_half("is reversed")]
    far = weighed(two, [gaining(0.9, "k_proj is transposed", is_of_tensor=True)])
    assert far.cause.endswith("k_proj is transposed: k_proj is transposed")
    assert (far.name, far.bound, far.subject) == ("drafts", "none", "module")
    near = weighed(two, [gaining(0.505, "k_proj is transposed", is_of_tensor=True)])
    assert "several explain it equally: k_proj is transposed; or q_norm" in near.cause
    harm = weighed(two, [gaining(0.4, "k_proj is damaged", is_trained=True)])
    assert HARM in harm.cause and "; or k_proj is damaged" in harm.cause
    less = weighed(two, [gaining(0.1, "k_proj is transposed", is_of_tensor=True)])
    assert less.cause == one_cause(two)
    size = [of_half("is twice", is_size=True), of_half("has 1 too much", is_size=True)]
    found = weighed(size, [gaining(0.4, "k_proj is damaged", is_trained=True)])
    assert "several explain it equally: q_norm is twice" in found.cause


def test_a_change_that_brings_most_drafts_back_is_not_weighed() -> None:
    found = weighed([replace(of_half("is reversed"), other=0.9)], [gaining(0.9, "another")])
    assert "another" not in found.cause


def test_a_change_of_a_module_is_of_the_half_that_it_changes() -> None:
    layer = SimpleNamespace(input_norm=1, attention=2, post_norm=3, feed_forward=4)
    own: Any = SimpleNamespace(
        embedding_norm=5, hidden_norm=6, projection=7, layer=layer, head=SimpleNamespace(norm=8)
    )

    def other(**changed: int) -> Any:
        return SimpleNamespace(**{**vars(own), "layer": SimpleNamespace(**vars(layer) | changed)})

    assert changed_half(own, other(attention=0)) == "attention"
    assert changed_half(own, other(post_norm=0)) == "feed_forward"
    assert changed_half(own, other(attention=0, post_norm=0)) == ""
    assert changed_half(own, SimpleNamespace(**{**vars(own), "projection": 0})) == "inputs"
