"""Faults that only running shows are caught without a source, and named. The main model is intact
in all of them, so its texts and hidden states are computed once."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from cases import nightly_but
from faults.fault import Fault
from faults.run_faults import DRAFTER_FAULTS, RUN_FAULTS, DrafterFault
from faults.suspected_faults import SUSPECTED_FAULTS
from mtp_export.verify.check import Item, Status
from mtp_export.verify.decoding import controls
from mtp_export.verify.decoding.acceptance import diagnosed
from mtp_export.verify.decoding.controls import too_few
from mtp_export.verify.decoding.drafter_agreement import drafter_items
from mtp_export.verify.diagnosis.alternatives import with_main_layers
from mtp_export.verify.evidence.corpus import Corpus
from mtp_export.verify.evidence.statistics import Estimate
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.streaming import open_streamed
from mtp_runtime.tokenizer import Tokenizer
from verify.foreign_sources import GLM, released

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
TOKENS, K = 24, 2
PLANTED = (*RUN_FAULTS, *SUSPECTED_FAULTS)


def held_out(count: int, fixture: Path = FIXTURE) -> list[tuple[int, ...]]:
    """Held-out prompts, shortened."""
    tokenizer = Tokenizer.find(fixture)
    lines = (ROOT / "fixtures/prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]]
    return [tokenizer.encode(text)[:24] for text in texts[:count]]


@dataclass(frozen=True)
class Good:
    """A good bundle of the fixture, and its corpus.

    few: a few of its prompts, enough to compare drafters with their module place by place.
    """

    bundle: Path
    corpus: Corpus
    few: Corpus


@pytest.fixture(scope="module")
def good(trained_bundle: Path) -> Good:
    model = load_model(trained_bundle, LoadOptions()).model
    corpus, few = (Corpus(model, tuple(held_out(count)), TOKENS) for count in (16, 10))
    _ = corpus.states, few.states
    return Good(trained_bundle, corpus, few)


def diagnosis(good: Good, bundle: Path) -> list[Item]:
    """Items about the MTP part of a bundle whose main part is the good one's."""
    with torch.inference_mode():
        model = open_streamed(bundle, "cpu").rest()
    corpus = Corpus(
        model=model,
        prompts=good.corpus.prompts,
        new_tokens=TOKENS,
        given=good.corpus.texts,
        given_states=good.corpus.states,
    )
    return list(diagnosed(corpus))


def causes(items: list[Item]) -> str:
    return " | ".join(f"{i.name}: {i.cause}" for i in items if i.status is Status.FAIL)


def test_no_false_alarm(good: Good) -> None:
    assert causes(diagnosis(good, good.bundle)) == ""
    assert causes(list(drafter_items(good.few, K))) == ""


def test_every_control_is_tested_and_lowers_acceptance(good: Good) -> None:
    """The fixture's norms vary, so that the hidden state before a norm is another one."""
    items = list(controls.items_of(good.corpus))
    assert {item.status for item in items} == {Status.PASS}, items
    assert sum("before the norm" in item.name for item in items) == 2


def test_few_drafts_say_nothing_of_the_contract(good: Good) -> None:
    """Where acceptance is low a working module loses nothing that so few of them could show."""
    tested = set()
    for first in range(0, 16, 2):
        few = Corpus(good.corpus.model, good.corpus.prompts[first : first + 2], 6)
        for item in controls.items_of(few):
            assert item.status is not Status.FAIL, item
            if item.status is Status.NOT_TESTED and item.data:
                tested.add(item.data["own"] <= 0.5)
                assert "too few drafts to tell" in item.cause and "it takes about" in item.cause
    assert tested == {True, False}


@pytest.mark.parametrize(
    ("loss", "needed"),
    [
        (Estimate(0.1, -0.1, 0.3, 50), 200),  # of the loss itself
        (Estimate(0.0, -0.1, 0.1, 50), 200),  # of what a working module loses at least
        (Estimate(0.02, -0.04, 0.08, 50), 200),
        (Estimate(0.0, 0.0, 0.0, 10), 60),  # none of so few differed
        (Estimate(-0.05, -0.15, 0.05, 50), None),
    ],
)
def test_how_many_drafts_it_takes(loss: Estimate, needed: int | None) -> None:
    assert (f"it takes about {needed:,};" if needed else "too small to tell") in too_few(loss)


@pytest.mark.parametrize("fault", nightly_but(PLANTED[::16], PLANTED), ids=lambda fault: fault.name)
def test_fault_is_named(fault: Fault, good: Good, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(good.bundle, tmp_path / "bundle"))
    fault.plant(bundle)
    assert fault.cause in causes(diagnosis(good, bundle))


@pytest.mark.nightly  # every variant of a module over all texts
def test_a_tuned_head_that_drafts_as_well_is_no_fault(tmp_path: Path) -> None:
    """The main model's is more certain by 0.04 nats, and has no more drafts accepted."""
    checkpoint, generator = released(GLM), torch.Generator().manual_seed(5)
    for last, main in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        own = checkpoint.tensors[f"{main}.weight"].float()
        noise = 0.0 if last == "embed_tokens" else 0.05 * own.std()
        own += noise * torch.randn(own.shape, generator=generator)
        checkpoint.set(f"{last}.weight", own.bfloat16())
    checkpoint.save(tmp_path / "tuned")
    model = load_model(tmp_path / "tuned", LoadOptions()).model
    corpus = Corpus(model, tuple(held_out(40, GLM)), TOKENS)
    assert causes(list(diagnosed(corpus))) == ""


@pytest.mark.parametrize("fault", DRAFTER_FAULTS, ids=lambda fault: fault.name)
def test_drafter_fault_is_named(
    fault: DrafterFault, good: Good, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is right, the drafter is not: texts stay the same, drafts do not.

    Greedy and sampled drafts are made in different ways, and each must show the fault.
    """
    monkeypatch.setitem(DRAFTERS, "mtp", replace(DRAFTERS["mtp"], build=fault.build))
    corpus = Corpus(
        model=good.few.model,
        prompts=good.few.prompts,
        new_tokens=TOKENS,
        given=good.few.texts,
        given_states=good.few.states,
    )
    for item in drafter_items(corpus, K):
        assert fault.cause in causes([item]), item


def test_a_main_layer_in_whose_place_the_block_lies_is_found(good: Good) -> None:
    """One that drafts no better as the block than what is there is no explanation."""
    streamed, module = open_streamed(FIXTURE, "cpu"), good.few.module
    layers = [streamed.layer(number) for number in (0, 53, 54)]
    model = replace(good.few.model, mtp_modules=(replace(module, layer=layers[1]),))
    corpus = replace(good.few, model=model, given=good.few.texts, given_states=good.few.states)
    (found,) = with_main_layers(corpus, (*layers, module.layer), ())
    assert "layer 3 and the MTP layer's block are in each other's place" in found.explained
    assert found.is_of_main and found.own < 0.1
    assert with_main_layers(corpus, layers, ()) == []
