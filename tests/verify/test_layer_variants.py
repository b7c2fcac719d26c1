"""Halves of main layers that do harm are suspected and named by plain text, and variants that run
side by side are those that run alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import export, nightly_but
from faults.fault import Fault
from faults.suspected_faults import SUSPECTED_LAYER_FAULTS
from mtp_export.verify.check import Status
from mtp_export.verify.decoding.changed import compared
from mtp_export.verify.diagnosis.layer_variants import Vectors
from mtp_export.verify.diagnosis.swapped_layers import swapped_layers
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import PlainTexts
from mtp_export.verify.evidence.side_by_side import SideBySide
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.layers.gated_delta_net import GatedDeltaNet
from mtp_runtime.streaming import open_streamed
from mtp_runtime.tokenizer import Tokenizer
from verify.foreign import Tensors, rewritten
from verify.test_likelihood import judged

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def doubled(layer: DecoderLayer, factor: float = 2.0) -> DecoderLayer:
    """A layer whose second norm has twice the weights."""
    norm = layer.post_norm
    return replace(layer, post_norm=replace(norm, weight=norm.weight * factor))


def test_variants_side_by_side_are_those_that_run_alone() -> None:
    """One of several layers changes them all; one that changes no row visibly is left out."""
    folder = FIXTURES / "glm4-moe-tiny"
    streamed = open_streamed(folder, "cpu")
    plain = PlainTexts.of(Tokenizer.find(folder)).code()

    def variants(number: int, layer: DecoderLayer) -> Iterator[tuple[str, DecoderLayer]]:
        if number > 0:
            yield "doubled", doubled(layer)
            yield "nearly the same", doubled(layer, 1.001)

    found = SideBySide.of(streamed, plain, variants)
    alone = Likelihood.of(
        streamed, plain, layer_of=lambda number, layer: doubled(layer) if number else layer
    )
    assert [variant for variant, _ in found.tried] == ["doubled"]
    for one, other in ((found.own, Likelihood.of(streamed, plain)), (found.tried[0][1], alone)):
        torch.testing.assert_close(one.sums, other.sums, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(found.own.sums, alone.sums, atol=0.1)


BLOCK = re.compile(r"(self_attn|mlp|input_layernorm|post_attention_layernorm)\.")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("", ""),
        ("model.layers.1.", "layer 1 and layer 2 are exchanged"),
        ("model.layers.3.", "layer 2 and the MTP layer's block are exchanged"),
    ],
    ids=["as it is", "a main layer", "the MTP layer"],
)
def test_layers_in_each_others_place_are_named(tmp_path: Path, other: str, named: str) -> None:
    own = "model.layers.2."

    def exchange(stored: Tensors) -> Tensors:
        of_both = {own: other, other: own} if other else {}
        names = {
            name: f"{there}{name.removeprefix(here)}"
            for name in stored
            for here, there in of_both.items()
            if name.startswith(here) and BLOCK.match(name.removeprefix(here))
        }
        return {names.get(name, name): one for name, one in stored.items()}

    folder = rewritten(FIXTURES / "glm4-moe-tiny", tmp_path / "swapped", exchange)
    streamed, plain = open_streamed(folder, "cpu"), PlainTexts.of(Tokenizer.find(folder)).code()
    found = SideBySide.of(streamed, plain, swapped_layers(streamed))
    best, *_ = compared(found.own, found.tried)
    assert best.is_far is (best.better and bool(named))
    assert best.variant.change == named or not (named or best.better)


def test_vectors_of_two_layers_are_exchanged() -> None:
    """One variant changes both, and each gets what is the other's; matrices stay."""
    streamed, known = open_streamed(FIXTURES / "qwen3-5-tiny", "cpu"), Vectors()
    layers = [known.watched(number, streamed.layer(number)) for number in range(2)]
    found = [dict(known.exchanged(number, layer)) for number, layer in enumerate(layers)]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 5
    name = "dt_bias of the attention of layer 0 and of layer 1 are exchanged"
    (variant,) = (one for one in found[0] if one.change == name)
    for number, one in enumerate(found):
        own, theirs = layers[number].attention, layers[1 - number].attention
        changed = one[variant].attention
        assert isinstance(own, GatedDeltaNet) and isinstance(theirs, GatedDeltaNet)
        assert isinstance(changed, GatedDeltaNet)
        assert changed.bias.equal(theirs.bias) and not changed.bias.equal(own.bias)
        assert changed.inputs is own.inputs and changed.convolution is own.convolution


# Two that are found in seconds.
_AT_ONCE = [
    one
    for one in SUSPECTED_LAYER_FAULTS
    if one.name
    in ("rows of o_proj of a main layer in another order", "head of the main model negated")
]


@pytest.mark.parametrize(
    "fault", nightly_but(_AT_ONCE, SUSPECTED_LAYER_FAULTS), ids=lambda f: f.name
)
def test_half_of_a_layer_that_does_harm_is_named(fault: Fault, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert export(FIXTURES / fault.needs, bundle, "--link", "copy", "--quiet").code == 0
    fault.plant(bundle)
    failed = [item for item in judged(bundle).values() if item.status is Status.FAIL]
    assert len(failed) == 1 and fault.cause in failed[0].cause
