"""Parts of main layers trained on plain code: layers under autograd are those that run, and what is
damaged gains on other code."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import export, quantize
from faults import planting
from faults.blind import opened
from faults.fault import Fault
from faults.suspected_faults import TRAINED_LAYER_FAULTS, noisy
from mtp_export.verify.check import EQUAL, Status, failed
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.decoding.changed import compared
from mtp_export.verify.decoding.several_vectors import of_several
from mtp_export.verify.decoding.training import MOST_SMALL, or_useless
from mtp_export.verify.diagnosis.layer_variants import LayerVariant, rerouted
from mtp_export.verify.diagnosis.trainable import Trainable
from mtp_export.verify.diagnosis.trainable_module import INPUTS, TrainableModule
from mtp_export.verify.diagnosis.trained import SMALL_STEPS, Parts, Trials
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.likelihood import Likelihood
from mtp_export.verify.evidence.plain_text import JUDGING, MORE_TRAINING, TRAINING, PlainTexts
from mtp_export.verify.gates import LEAST_SHARE_NATS, LEAST_SMALL_SHARE_NATS, LEAST_TRAINED_NATS
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.streaming import open_streamed
from mtp_runtime.tokenizer import Tokenizer
from verify.foreign import Tensors, rewritten
from verify.test_likelihood import judged

ROUTED = "num_experts_per_tok is %d in every layer of its kind"
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.mark.parametrize("name", ["glm4-moe-tiny", "qwen3-5-tiny"])
def test_layers_under_autograd_are_those_that_run(name: str) -> None:
    """Texts have the same last states; every tensor but biases of routers has a slope."""
    folder = FIXTURES / name
    streamed = open_streamed(folder, "cpu")
    texts = PlainTexts.of_modules(Tokenizer.find(folder), JUDGING[:1], 4)
    model, table = Trainable.of(streamed), texts.table
    wanted = Likelihood.of(streamed, texts).states
    torch.testing.assert_close(model.states(table)[-1], wanted, rtol=1e-4, atol=1e-3)
    spots = list(model.spots())
    leaves = {id(leaf): leaf for spot in spots for leaf, _ in spot.parts}
    for leaf in leaves.values():
        leaf.requires_grad_(True)
    loss = model.loss(-1, torch.empty(0), table)
    slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    assert all(slope is not None and bool(slope.any()) for slope in slopes)


def test_a_damaged_half_gains_and_stays_as_it_is(tmp_path: Path) -> None:
    """Other code is likelier when it was trained, and then it holds what it held."""
    bundle = tmp_path / "bundle"
    assert export(FIXTURES / "glm4-moe-tiny", bundle, "--link", "copy", "--quiet").code == 0
    planting.change(bundle / "main", "model.layers.0.mlp.down_proj.weight", noisy)
    tokenizer = Tokenizer.find(bundle / "main")
    texts = (PlainTexts.of_modules(tokenizer, some[:6], 4) for some in (TRAINING, JUDGING))
    trials = Trials.of(Trainable.of(open_streamed(bundle, "cpu")), *texts)
    parts = [leaf for spot in trials.model.spots() for leaf, _ in spot.parts]
    before = [leaf.clone() for leaf in parts]
    gain = trials.own.fitted_gain(trials.trained_half((0, "feed_forward"))[1], 0.98)
    assert all(map(torch.equal, before, parts))
    assert gain is not None and gain.low is not None and gain.low > LEAST_TRAINED_NATS


@pytest.mark.nightly  # trains a model for as many steps as verify
@pytest.mark.parametrize("damaged", [False, True], ids=["good", "noise in o_proj"])
def test_a_damaged_half_shares_in_training_beside_all_others(tmp_path: Path, damaged: bool) -> None:
    """The damage costs 0.02 nats; taken back, all tensors hold what they held."""
    bundle = glm_bundle(tmp_path)
    if damaged:
        planting.change(bundle / "main", "model.layers.0.self_attn.o_proj.weight", noisy)
    trials = as_verified(bundle)
    found = shares_of(trials, trials.layers_whole())
    sharing = [(one.layer, one.half) for one, gain in found.items() if gain > LEAST_SHARE_NATS]
    assert sharing == ([(0, "attention")] if damaged else [])


@pytest.mark.nightly
@pytest.mark.parametrize("damaged", [False, True], ids=["good", "another layer's norm"])
def test_a_damaged_norm_shares_in_training_beside_small_tensors(
    tmp_path: Path, damaged: bool
) -> None:
    """The damage costs 0.02 nats, of which no half gives back more than those of a good model."""
    bundle, name = glm_bundle(tmp_path), "model.layers.%d.post_attention_layernorm.weight"
    if damaged:
        planting.write(bundle / "main", {name % 1: planting.read(bundle / "main", name % 2)})
    trials = as_verified(bundle)
    found = shares_of(trials, trials.small_ones(), SMALL_STEPS, MOST_SMALL)
    assert len(found) == MOST_SMALL
    sharing = [one.change for one, gain in found.items() if gain > LEAST_SMALL_SHARE_NATS]
    assert sharing == (["post_attention_layernorm of layer 1 is trained"] if damaged else [])


def glm_bundle(tmp_path: Path) -> Path:
    bundle = tmp_path / "bundle"
    assert export(FIXTURES / "glm4-moe-tiny", bundle, "--link", "copy", "--quiet").code == 0
    return bundle


def as_verified(bundle: Path) -> Trials:
    """A model and the texts on which parts are trained together."""
    tokenizer = Tokenizer.find(bundle / "main")
    modules = ((*TRAINING, *MORE_TRAINING), JUDGING)
    texts = (PlainTexts.of_modules(tokenizer, names, 8) for names in modules)
    return Trials.of(Trainable.of(open_streamed(bundle, "cpu")), *texts)


def shares_of(trials: Trials, parts: Parts, *how: int) -> dict[LayerVariant, float]:
    """Shares of parts in training, after which all tensors hold what they held."""
    held = [leaf for spot in trials.model.spots() for leaf, _ in spot.parts]
    before = [leaf.clone() for leaf in held]
    found = {}
    for variant, without, trained in trials.taken_back(parts, *how):
        gain = without.fitted_gain(trained, 0.98)
        assert gain is not None
        found[variant] = gain.value
    assert all(map(torch.equal, before, held))
    return found


def test_a_module_under_autograd_is_the_one_that_runs_and_gains_where_it_is_damaged(
    tmp_path: Path,
) -> None:
    bundle = tmp_path / "bundle"
    assert export(FIXTURES / "glm4-moe-tiny", bundle, "--link", "copy", "--quiet").code == 0
    planting.change(bundle / "mtp", "model.layers.3.eh_proj.weight", noisy)
    streamed, tokenizer = open_streamed(bundle, "cpu"), Tokenizer.find(bundle / "main")
    texts = [PlainTexts.of_modules(tokenizer, some[:6], 4) for some in (TRAINING, JUDGING)]
    trials = Trials.of(Trainable.of(streamed), *texts)
    of_module = trials.of_module(TrainableModule.of(streamed))
    given = texts[1].texts
    corpus = Corpus(load_model(bundle, LoadOptions()).model, (), 0, given=given)
    wanted = corpus.draft_outputs(1, anchors=given.anchors(0))[0]
    found = of_module.judged[-1].view(len(given.texts), -1, wanted.shape[1])[:, :-1]
    torch.testing.assert_close(found.flatten(0, 1), wanted, rtol=1e-3, atol=1e-2)
    last = [(some, Likelihood.of(streamed, some).states) for some in texts]
    streamed_to = Trials.fed(TrainableModule.of(streamed), streamed.rest().head, *last)
    torch.testing.assert_close(streamed_to.judged, of_module.judged, rtol=1e-3, atol=1e-2)
    half = (0, INPUTS)
    gain = of_module.own.fitted_gain(of_module.trained_half(half)[1], 0.98)
    assert gain is not None and gain.low is not None and gain.low > LEAST_TRAINED_NATS


def test_a_module_that_knows_no_text_is_told_as_a_whole() -> None:
    """Its best change still leaves it worse than how often tokens come; a good one is far above."""
    folder = FIXTURES / "glm4-moe-tiny"
    tokenizer = Tokenizer.find(folder)
    texts = (PlainTexts.of_modules(tokenizer, some[:6], 4) for some in (TRAINING, JUDGING))
    trials = Trials.of(Trainable.of(open_streamed(folder, "cpu")), *texts)
    counts = Counter(trials.code.texts.tokens.tolist())
    total = len(trials.code.texts.tokens) + 0.5 * trials.model.head.linear.weight.shape[0]
    logs = [
        math.log((counts[t] + 0.5) / total) for t in trials.judging.table[:, 1:].flatten().tolist()
    ]
    assert trials.by_frequencies() == pytest.approx(sum(logs) / len(logs))
    assert trials.own.fitted() > trials.by_frequencies() + 2
    undone = LayerVariant(0, "two norms are exchanged", "they are in each other's place")
    best = compared(trials.own, [(undone, trials.own)])[0]
    useless: Any = SimpleNamespace(fitted=lambda: trials.by_frequencies() - 1)
    found = failed("training", undone.cause, data={EQUAL: 3})
    assert or_useless(found, trials, best) is found
    told = or_useless(found, trials, replace(best, under=useless))
    assert "the whole layer is another main model's" in told.cause and told.data[EQUAL] == 1


@pytest.mark.nightly  # takes 144 texts through 61 layers
def test_the_module_of_a_deep_model_is_trained_where_its_drafts_are_refused(tmp_path: Path) -> None:
    """Acceptance rises by what makes up for some of the damage, a norm of twice its size."""
    bundle, name = tmp_path / "bundle", "model.layers.61.self_attn.kv_a_proj_with_mqa.weight"
    schemes = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--link", "copy", "--quiet")
    assert quantize(FIXTURES / "deepseek-v3-tiny", bundle, *schemes).code == 0
    planting.change(bundle / "mtp", name, lambda one: one.t().reshape(one.shape).clone())
    context = opened(bundle)
    found = [one for one in diagnosed(context.corpus, context=context) if one.cause]
    assert [one.cause.rpartition(": ")[2] for one in found] == [
        "kv_a_proj_with_mqa of the MTP layer is transposed"
    ]


@pytest.mark.nightly  # takes texts through 61 layers
def test_a_deep_main_layer_and_the_block_in_each_others_place_are_told(tmp_path: Path) -> None:
    """The original's module would not mend both, so that it is not what the failure is about."""

    def exchange(tensors: Tensors) -> None:
        for name in [one for one in tensors if one.startswith("model.layers.53.")]:
            other = name.replace(".53.", ".61.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    source = rewritten(FIXTURES / "deepseek-v3-tiny", tmp_path / "exchanged", exchange)
    schemes = ("--base-quant", "bf16", "--mtp-quant", "bf16", "--link", "copy", "--quiet")
    assert quantize(source, tmp_path / "bundle", *schemes).code == 0
    context = opened(tmp_path / "bundle")
    items = diagnosed(context.corpus, context=context)
    found = [one for one in items if one.status is Status.FAIL]
    told = "layer 53 and the MTP layer's block are in each other's place"
    assert len(found) == 2 and all(told in one.cause for one in found)
    assert not any(one.subject for one in found)


def test_other_values_of_routing_are_tried_in_all_layers() -> None:
    """One at which plain text is likelier is what config.json should say."""
    folder = FIXTURES / "glm4-moe-tiny"
    streamed, tokenizer = open_streamed(folder, "cpu"), Tokenizer.find(folder)
    texts = [PlainTexts.of_modules(tokenizer, some[:6], 4) for some in (TRAINING[:1], JUDGING)]
    model = Trainable.of(streamed)
    found = [{v.change: other for v, other in rerouted(layer)} for layer in model.layers]
    layers = (o.get(ROUTED % 4, one) for o, one in zip(found, model.layers, strict=True))
    trials = Trials.of(replace(model, layers=tuple(layers)), *texts)
    best = compared(trials.own, trials.rerouted())[0]
    assert best.variant.change == ROUTED % 2 and best.gain.value > 0
    assert "is 4, and the model was trained with about 2" in best.variant.cause


SMOOTHED = ("post_attention_layernorm", "input_layernorm")


@pytest.mark.parametrize("count", [1, 2])
def test_norms_that_the_same_was_done_to_are_all_named(tmp_path: Path, count: int) -> None:
    """As a quantization leaves those that it divided by scales of channels: no other is named."""

    def smooth(stored: Tensors) -> None:
        seed = torch.Generator().manual_seed(5)
        for name in SMOOTHED[:count]:
            scales = torch.exp(torch.randn(128, generator=seed)).clamp(0.2, 6)
            stored[f"model.layers.3.{name}.weight"] /= scales.bfloat16()

    folder = rewritten(FIXTURES / "glm4-moe-tiny", tmp_path / "smoothed", smooth)
    streamed, tokenizer = open_streamed(folder, "cpu"), Tokenizer.find(folder)
    texts = [PlainTexts.of_modules(tokenizer, some[:6], 4) for some in (TRAINING[:1], JUDGING)]
    trials = Trials.of(Trainable.of(streamed), *texts).of_module(TrainableModule.of(streamed))
    (spot,) = (
        one for some in trials.halves.values() for one in some if one.place.name == SMOOTHED[0]
    )
    best = compared(trials.own, trials.undone(spot))[0]
    found = of_several(trials, best)
    if count == 1:
        assert found is None
    else:
        assert found is not None and found.gain.value > best.gain.value > 0
        assert found.variant.cause == f"{best.variant.cause}; likewise {SMOOTHED[1]}"


@pytest.mark.nightly
@pytest.mark.parametrize("fault", TRAINED_LAYER_FAULTS, ids=lambda fault: fault.name)
def test_a_damaged_tensor_is_named(fault: Fault, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert export(FIXTURES / fault.needs, bundle, "--link", "copy", "--quiet").code == 0
    fault.plant(bundle)
    failed = [item for item in judged(bundle).values() if item.status is Status.FAIL]
    assert len(failed) == 1 and fault.cause in failed[0].cause
