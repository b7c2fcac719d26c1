"""Changes of single tensors, as matrices and in products, and faults that only they name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import nightly_but
from mtp_checkpoints.formats import unquantized
from mtp_export.verify.check import Status
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.diagnosis import experts
from mtp_export.verify.diagnosis.alternatives import alternatives
from mtp_export.verify.diagnosis.changed_weight import linears_scaled
from mtp_export.verify.diagnosis.scaled_variants import single_tensor_variants
from mtp_export.verify.diagnosis.tensor_variants import (
    OF_MATRICES,
    OF_VECTORS,
    Change,
    Place,
    mlp_places,
    tensor_variants,
)
from mtp_export.verify.diagnosis.variants import layout_variants
from mtp_export.verify.evidence.corpus import Corpus
from mtp_kernels.sizes import ONE_EXPERT
from mtp_runtime.drafters.base import ScoredVariant
from mtp_runtime.layers.linear import Linear
from mtp_runtime.layers.mla import Halves
from mtp_runtime.layers.moe import HeldExperts, Mlp, Moe, SoftmaxRouter
from mtp_runtime.layers.norm import RmsNorm
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import MtpModule
from mtp_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
GLM = ROOT / "fixtures/glm4-moe-tiny"
STACKS = [("down", "down_proj"), ("gate_up", "gate_proj and up_proj")]


@dataclass(frozen=True)
class Holder:
    """A layer of one tensor."""

    held: Any


def changed_matrix(matrix: torch.Tensor, change: Change) -> torch.Tensor:
    """The change by its definition."""
    if change.rows is not None:
        matrix = matrix[change.rows(len(matrix))]
    if change.columns is not None:
        matrix = matrix[:, change.columns(matrix.shape[1])]
    return matrix * change.factor


@pytest.mark.parametrize("change", OF_MATRICES, ids=lambda change: change.done)
def test_a_changed_matrix_in_the_rows_of_others(change: Change) -> None:
    """A part of stacked matrices changes, the others do not; products are those of the matrix."""
    matrix, x = torch.randn(12, 6), torch.randn(3, 6)
    held = Holder(Linear(unquantized(matrix)))
    place = Place("k_proj", ("held",), (4, 10), adds="the attention")
    (found,) = (w for _, c, w in tensor_variants(held, [place]) if c is change)
    wanted = matrix.clone()
    wanted[4:10] = changed_matrix(matrix[4:10], change)
    weight = found.held.weight
    torch.testing.assert_close(weight.dequantize(torch.float32), wanted)
    torch.testing.assert_close(weight.product(x), x @ wanted.t())


@pytest.mark.parametrize("change", OF_VECTORS, ids=lambda change: change.done)
def test_a_changed_part_of_a_bias(change: Change) -> None:
    """As of a norm as it is stored, less 1; the rest of the bias stays."""
    bias, offset = torch.randn(12), 1.0
    norm = Holder(RmsNorm.build(bias[4:10], 1e-6, offset))
    (wanted,) = (w for _, c, w in tensor_variants(norm, [Place("norm", ("held",))]) if c is change)
    place = Place("k_proj.bias", ("held",), (4, 10))
    (found,) = (w for _, c, w in tensor_variants(Holder(bias), [place]) if c is change)
    torch.testing.assert_close(found.held[4:10] + offset, wanted.held.weight)
    torch.testing.assert_close(found.held[:4], bias[:4])
    torch.testing.assert_close(found.held[10:], bias[10:])


@pytest.mark.parametrize("change", [c for c in OF_MATRICES if c.rows], ids=lambda c: c.done)
def test_an_order_of_a_routers_rows_is_undone(change: Change) -> None:
    """By one variant, whose cause has the order in it."""
    weight, order = torch.randn(4, 8), change.rows(8)  # type: ignore[misc]
    router = SoftmaxRouter(weight[:, order.argsort()], None)  # type: ignore[arg-type]
    causes = [c for _, c, one in experts.router_variants(router) if torch.equal(one.weight, weight)]
    assert len(causes) == 1 and change.wrong in causes[0]


@pytest.mark.parametrize("change", OF_MATRICES[:1] + OF_MATRICES[4:], ids=lambda c: c.done)
def test_changed_halves_are_those_of_the_changed_matrix(change: Change) -> None:
    """kv_b_proj, of which the runtime holds two halves."""
    matrix = torch.randn(2 * (4 + 6), 8)
    held = Holder(Halves.of(matrix, heads=2, nope=4))
    place = Place("kv_b_proj", ("held",))
    (found,) = (w for _, c, w in tensor_variants(held, [place]) if c is change)
    wanted = Halves.of(changed_matrix(matrix, change), heads=2, nope=4)
    torch.testing.assert_close(found.held.key_up, wanted.key_up)
    torch.testing.assert_close(found.held.value_up, wanted.value_up)


def test_all_linears_of_a_part_are_scaled() -> None:
    """Those of the experts of a mixture too, and nothing else."""
    gate_up, down = torch.randn(8, 6), torch.randn(6, 4)
    expert = Mlp(Linear(unquantized(gate_up)), Linear(unquantized(down)))
    router = SoftmaxRouter(torch.randn(6, 1), ONE_EXPERT)
    halves = Halves.of(torch.randn(20, 8), heads=2, nope=4)
    held = Holder(Moe(router, HeldExperts((expert,)), shared=0)), Holder(halves)
    mixture, other = (linears_scaled(one, 0.5).held for one in held)
    (found,) = mixture.experts.every()
    for linear, matrix in ((found.gate_up, gate_up), (found.down, down)):
        assert linear.weight.dequantize(torch.float32).equal(matrix / 2)
    assert mixture.router is router
    assert other.key_up.equal(halves.key_up / 2) and other.value_up.equal(halves.value_up / 2)


def test_orders_undo_what_their_causes_say() -> None:
    by_done = {change.done: change for change in (*OF_MATRICES, *OF_VECTORS)}
    rows = torch.arange(8)
    by_turns = rows.view(2, 4).t().flatten()  # what an exporter wrote by turns from two halves
    even_first, turns = (
        by_done["the even rows of {} are put first"],
        by_done["the halves of {} are put by turns"],
    )
    assert even_first.rows is not None and turns.rows is not None
    assert by_turns[even_first.rows(8)].equal(rows)
    assert even_first.rows(8)[turns.rows(8)].equal(rows)


@cache
def glm() -> Corpus:
    """The small GLM on built-in prompts of its fixture."""
    tokenizer = Tokenizer.find(GLM)
    lines = (ROOT / "fixtures/prompts.jsonl").read_text().splitlines()[::4]
    prompts = tuple(tokenizer.encode(json.loads(line)["prompt"])[:24] for line in lines)
    corpus = Corpus(load_model(GLM, LoadOptions()).model, prompts, 24)
    _ = corpus.states
    return corpus


def causes(module: MtpModule) -> str:
    """Causes of what fails with a module of the small GLM."""
    good = glm()
    model = replace(good.model, mtp_modules=(module,))
    corpus = Corpus(model, good.prompts, 24, given=good.texts, given_states=good.states)
    return " | ".join(item.cause for item in diagnosed(corpus) if item.status is Status.FAIL)


PLANTED = (
    (
        "the halves of the rows of q_proj are exchanged",
        "q_proj of the MTP layer has the halves of its rows exchanged",
    ),
    ("v_proj is negated", "v_proj of the MTP layer has the wrong sign"),
    (
        "the halves of the columns of o_proj are exchanged",
        "o_proj of the MTP layer has the halves of its colu",
    ),
    ("hnorm is reversed", "hnorm is in reverse order"),
    # These change the certainty of drafts more than what is drafted.
    ("k_norm is multiplied by 2", "k_norm of the MTP layer is about 2 times"),
    ("o_proj is multiplied by 0.5", "o_proj of the MTP layer is about 0.5 times"),
)


@pytest.mark.parametrize(("change", "cause"), nightly_but(PLANTED[1:2], PLANTED))
def test_the_changed_tensor_is_named(change: str, cause: str) -> None:
    """Each of these changes undoes itself."""
    corpus = glm()
    variants = single_tensor_variants(corpus.model, corpus.module)
    assert cause in causes(next(v.module for v in variants if v.change == change))


def test_a_reversed_concatenation_is_no_variant_of_a_tensor() -> None:
    """It is one of the module's, so that it was said twice."""
    corpus = glm()
    changes = [v.change for v in single_tensor_variants(corpus.model, corpus.module)]
    assert "the columns of eh_proj are put in reverse order" in changes
    assert "the halves of the columns of eh_proj are exchanged" not in changes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tensor", "change", "wrong"),
    [
        ("gate_proj", "{} is negated", "has the wrong sign"),
        ("up_proj", "the rows of {} are reversed", "has its rows in reverse order"),
        ("down_proj", "the halves of the columns of {} are exchanged", "has the halves of its col"),
    ],
)
def test_the_changed_tensor_of_an_expert_is_named(tensor: str, change: str, wrong: str) -> None:
    moe = glm().module.layer.feed_forward
    assert isinstance(moe, Moe)
    held = [*moe.experts.every()]
    (changed,) = (
        one
        for place, done, one in tensor_variants(held[2], [*mlp_places(held[2], "")])
        if place.name == tensor and done.done == change
    )
    other = replace(moe, experts=HeldExperts((*held[:2], changed, *held[3:])))
    layer = replace(glm().module.layer, feed_forward=other)
    found = causes(replace(glm().module, layer=layer))
    assert f"{tensor} of expert 2 of the MTP layer {wrong}" in found


def moved_on(moe: Moe, field: str) -> HeldExperts:
    """The experts, of which one matrix is each the one of the expert before."""
    routed = [*moe.experts.each(range(moe.routed_experts))]
    shared = [*moe.experts.each(range(moe.routed_experts, len(moe.experts)))]
    before = [*routed[-1:], *routed[:-1]]
    pairs = zip(routed, before, strict=True)
    moved = [replace(one, **{field: getattr(other, field)}) for one, other in pairs]
    return HeldExperts((*moved, *shared))


@pytest.mark.parametrize(
    ("field", "part"),
    nightly_but(STACKS[:1], STACKS),
)
def test_a_matrix_of_every_expert_that_is_the_next_ones_is_named(field: str, part: str) -> None:
    moe = glm().module.layer.feed_forward
    assert isinstance(moe, Moe)
    other = replace(moe, experts=moved_on(moe, field))
    layer = replace(glm().module.layer, feed_forward=other)
    found = causes(replace(glm().module, layer=layer))
    assert f"{part} of every routed expert of the MTP layer is of the expert before it" in found


@pytest.mark.nightly
def test_a_good_module_passes() -> None:
    assert causes(glm().module) == ""


def test_of_many_experts_those_are_exchanged_that_drafts_do_best_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router, single experts, tensors of the two that do most harm, and every two of the few; a
    quarter of the texts judges."""
    monkeypatch.setattr(experts, "MOST_EXPERTS", 3)
    tried = [one for one in alternatives(glm()) if isinstance(one.variant, ScoredVariant)]
    count = experts.expert_variant_count(glm().module)
    assert len(tried) == count
    gains = {one.variant.change: one.gain for one in tried}
    out = {e: gains[f"the output of expert {e} is left out"] for e in range(8)}
    few = sorted(sorted(out, key=lambda expert: -sum(out[expert].sums))[:3])
    pairs = {change for change in gains if change.startswith("experts ")}
    assert pairs == {f"experts {a} and {b} are exchanged" for a, b in combinations(few, 2)}
    assert "the router is negated" in gains
    harmful = sorted(few, key=lambda expert: -sum(out[expert].sums))[:2]
    negated = {change for change in gains if re.match("gate_proj of expert .* negated", change)}
    assert negated == {f"gate_proj of expert {expert} is negated" for expert in harmful}
    assert {len(gain.sums) for gain in gains.values()} == {4}


def test_gate_and_up_of_a_dense_module_are_tried_in_each_others_place() -> None:
    """Of Qwen3.5's module, whose feed-forward is no mixture of experts."""
    model = load_model(ROOT / "fixtures/qwen3-5-tiny", LoadOptions()).model
    assert model.mtp is not None
    (found,) = (one for one in layout_variants(model, model.mtp) if one.name == "gate and up")
    own, other = model.mtp.layer.feed_forward, found.module.layer.feed_forward
    assert isinstance(own, Mlp) and isinstance(other, Mlp)
    gate, up = own.gate_up.weight.dequantize(torch.float32).chunk(2)
    swapped = other.gate_up.weight.dequantize(torch.float32)
    assert swapped.equal(torch.cat([up, gate])) and other.down is own.down
    assert "the feed-forward of the MTP layer are swapped" in found.cause
