"""The checks that run a model catch faults of an engine, and do not take rounding for a fault. A
small random model is enough; planted drafters exercise acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import export
from faults.matrix import no_progress
from faults.runtime_faults import (
    RUNTIME_FAULTS,
    STATE_FAULTS,
    RuntimeFault,
    accepts_one_too_many,
    exact_but,
)
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import controls, greedy, paths, sampling
from mtp_export.verify.decoding.greedy import Trial
from mtp_export.verify.evidence.decode import Decoded
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.models import memory_plan
from mtp_runtime.models.execution import Outputs
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint

TOKENS, K = 12, 2
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def exported(folder: Path, config: dict[str, Any] | None = None) -> Path:
    write_checkpoint(folder / "source", config)
    assert export(folder / "source", folder / "bundle", "--link", "copy", "--quiet").code == 0
    return folder / "bundle"


def decoded(bundle: Path) -> Context:
    """A good bundle with its texts decoded plainly, before any fault is planted."""
    options = VerifyOptions(bundle, None, Level.RUN, max_new_tokens=TOKENS, ks=(1, K))
    context = Context.open(options, no_progress)
    _ = context.corpus.plain
    return context


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def whole(bundle: Path) -> Context:
    return decoded(bundle)


def test_a_model_that_does_not_fit_into_memory_is_not_run(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 1000})
    context = Context.open(VerifyOptions(bundle), no_progress)
    assert context.why_not_run is not None and "use verify --stream" in context.why_not_run
    options = LoadOptions()
    plan = open_model(bundle, options, packs=options.compiled).memory_plan(options)
    for free, fits in ((plan.needed_bytes(0), True), (plan.needed_bytes(0) - 1, False)):
        monkeypatch.setattr(memory_plan, "free_memory", lambda free=free: {"free": free})
        assert (Context.open(VerifyOptions(bundle), no_progress).why_not_run is None) is fits


@dataclass(frozen=True)
class Setup:
    """A good bundle, and plain decoding of some prompts by an intact runtime."""

    context: Context
    trial: Trial


def trial_of(whole: Context) -> Trial:
    return Trial(whole.corpus.model, greedy.mixed_prompts(whole.prompts), PARAMS)


@pytest.fixture(scope="module")
def trial(whole: Context) -> Trial:
    return trial_of(whole)


@pytest.fixture
def setup(whole: Context, trial: Trial) -> Setup:
    return setup_of(whole, trial)


def setup_of(whole: Context, trial: Trial) -> Setup:
    """A fresh corpus, so that speculative runs are decoded anew."""
    fresh = replace(whole, _loaded=whole._loaded)
    fresh.__dict__["corpus"] = replace(whole.corpus, _decoded={})
    fresh.corpus.__dict__["plain"] = whole.corpus.plain
    return Setup(fresh, trial)


def said(items: Sequence[Item] | Iterator[Item]) -> str:
    """The names and causes of failed items."""
    return " | ".join(f"{i.name}: {i.cause}" for i in items if i.status is Status.FAIL)


def greedy_items(setup: Setup) -> list[Item]:
    """A run with drafts that are right for two tokens, and limits inside a block."""
    trial = setup.trial
    found = trial.run("planted", 4, trial.planted(right_for=2))
    return [greedy._equal(trial, found, "planted"), greedy._limits(trial), greedy._end_token(trial)]


def sampling_items(setup: Setup) -> list[Item]:
    context = setup.context
    return [sampling._chi_square(context), sampling._top_p_limit(context)]


ITEMS: dict[str, Callable[[Setup], list[Item]]] = {
    "greedy": greedy_items,
    "sampling": sampling_items,
    "controls": lambda setup: list(controls._causality(setup.context.corpus)),
    "paths": lambda setup: list(paths.run(setup.context)),
}
HERE = [fault for fault in RUNTIME_FAULTS if fault.caught_by in ITEMS]


@pytest.mark.parametrize("check", ITEMS)
def test_an_intact_runtime_passes(check: str, setup: Setup) -> None:
    assert said(ITEMS[check](setup)) == ""


def test_an_intact_runtime_passes_with_few_tokens(whole: Context) -> None:
    """No limit inside a block lies beyond plain decoding's output."""
    params = replace(PARAMS, max_tokens=greedy.tokens_per_prompt(2))
    trial = Trial(whole.corpus.model, greedy.mixed_prompts(whole.prompts), params)
    assert said([greedy._limits(trial), greedy._end_token(trial)]) == ""


@pytest.mark.parametrize("fault", HERE, ids=lambda fault: fault.name)
def test_fault_is_named(fault: RuntimeFault, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    assert fault.cause in said(ITEMS[fault.caught_by](setup))


def test_faults_of_states_are_named(tmp_path: Path) -> None:
    whole = decoded(exported(tmp_path, SMALL_CONFIGS["qwen3_5_text"]))
    trial = trial_of(whole)
    for check in ("greedy", "paths"):
        assert said(ITEMS[check](setup_of(whole, trial))) == ""
    for fault in STATE_FAULTS:
        with pytest.MonkeyPatch.context() as plant:
            fault.plant(plant)
            assert fault.cause in said(ITEMS[fault.caught_by](setup_of(whole, trial))), fault.name


def replaced(plain: Decoded, place: int, token: int) -> Decoded:
    """The run with one token of its first output replaced."""
    request = plain.requests[0]
    other = Request(0, request.prompt, request.params)
    other.tokens = list(request.tokens)
    other.tokens[len(request.prompt) + place] = token
    return replace(plain, requests=(other, *plain.requests[1:]))


def tied(model: Model, token: int, other: int) -> Model:
    """The model with the same row of the head for two tokens."""
    linear = model.head.linear
    columns = linear.matrix(torch.float32).clone()  # [d, vocab]
    columns[:, other] = columns[:, token]
    outputs = Outputs(replace(linear, transposed=columns), model.execution)
    return replace(model, head=replace(model.head, outputs=outputs))


def test_a_tie_is_no_fault_and_a_fault_no_tie(whole: Context) -> None:
    """The same divergence between tokens of equal logits passes, between others it fails."""
    plain, model = whole.corpus.plain, whole.corpus.model
    best = plain.outputs[0][3]
    other = (best + 1) % model.config.vocab
    run = replaced(plain, 3, other)
    apart = greedy._classified(greedy.Reference(model, plain), run, "apart")
    assert apart.status is Status.FAIL and "far above what rounding can change" in apart.cause
    tie = greedy._classified(greedy.Reference(tied(model, best, other), plain), run, "tie")
    assert tie.status is Status.PASS and "1 of" in tie.figure, tie


def test_chi_square_alone_sees_drafts_that_are_always_accepted(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts accepted is no reason to skip the test."""
    (fault,) = (fault for fault in HERE if fault.name == "every sampled draft is accepted")
    fault.plant(monkeypatch)
    item = sampling._chi_square(setup.context)
    assert item.status is Status.FAIL and "wrong proposal distribution" in item.cause, item


def test_both_layers_of_a_leaking_mask_are_seen(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = (fault for fault in HERE if fault.name == "a mask that leaks")
    fault.plant(monkeypatch)
    found = said(ITEMS["controls"](setup))
    assert "target: no row" in found and "MTP module: no row" in found


def test_speculation_that_changes_most_texts(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_but(accept_greedy=accepts_one_too_many)(monkeypatch)
    assert "most texts differ with speculation" in said(ITEMS["paths"](setup))


@pytest.mark.parametrize("experts", [8, 0])
def test_experts_of_one_text_that_tie_are_no_fault(experts: int) -> None:
    """From a token on one text of a model with experts may differ where an order of sums does; two
    may not, and where there are no experts none may."""
    wanted = [torch.ones(length, 5) for length in (9, 6, 7)]
    apart = [text.clone() for text in wanted]
    for text in apart:
        text[4:6] += 2e-3
    main = SimpleNamespace(config={"n_routed_experts": experts})
    context: Any = SimpleNamespace(main=main)
    statuses = [
        paths._close_but_for_ties(
            context,
            "a path",
            wanted=wanted,
            found=[*apart[:count], *wanted[count:]],
            cause="cause",
        ).status
        for count in (0, 1, 2)
    ]
    one = Status.PASS if experts else Status.FAIL
    assert statuses == [Status.PASS, one, Status.FAIL]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("text", [0, 1, 2])
def test_no_tie_makes_numbers_that_are_not_finite(text: int, wrong: float) -> None:
    wanted = [torch.ones(length, 5) for length in (9, 6, 7)]
    found = [one.clone() for one in wanted]
    found[text][3, 2] = wrong
    context: Any = SimpleNamespace(main=SimpleNamespace(config={"n_routed_experts": 8}))
    item = paths._close_but_for_ties(context, "a path", wanted=wanted, found=found, cause="cause")
    assert item.status is Status.FAIL
