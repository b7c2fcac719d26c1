"""Faults planted into the runtime itself: the checks that run a model must see each, and must not
take rounding for a fault. A small random model is enough; planted drafters exercise acceptance."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import export
from mtp_export.progress import ProgressCallback, silent
from mtp_export.verify import controls, greedy, noise, paths, sampling
from mtp_export.verify.base import Item, Level, Status
from mtp_export.verify.context import Context, VerifyOptions
from mtp_export.verify.decode import Decoded
from mtp_export.verify.greedy import Trial
from mtp_runtime import acceptance, engine, teacher
from mtp_runtime.acceptance import Verdict
from mtp_runtime.layers import attention
from mtp_runtime.layers.attention import BatchLayout
from mtp_runtime.layout import lay_out
from mtp_runtime.models.deepseek_v3 import DeepseekV3
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import write_checkpoint

TOKENS, K = 12, 2
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
Plant = pytest.MonkeyPatch


@contextlib.contextmanager
def no_progress(title: str, total_bytes: int) -> Iterator[ProgressCallback]:
    yield silent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_checkpoint(folder / "source")
    assert export(folder / "source", folder / "bundle", "--link", "copy", "--quiet").code == 0
    return folder / "bundle"


@pytest.fixture(scope="module")
def whole(bundle: Path) -> Context:
    """A good bundle with its plain texts decoded, before anything is planted."""
    options = VerifyOptions(bundle, None, Level.RUN, max_new_tokens=TOKENS, ks=(1, K))
    context = Context.open(options, no_progress)
    _ = context.corpus.plain
    return context


@pytest.fixture
def context(whole: Context) -> Context:
    """The same, with a corpus of its own: what is decoded speculatively is decoded anew."""
    fresh = replace(whole, _loaded=whole._loaded)
    fresh.__dict__["corpus"] = replace(whole.corpus, _decoded={})
    fresh.corpus.__dict__["plain"] = whole.corpus.plain
    return fresh


def said(items: Iterator[Item] | list[Item]) -> str:
    """What failed, and the words for it."""
    return " | ".join(f"{i.name}: {i.cause}" for i in items if i.status is Status.FAIL)


# --- greedy equality


def trial_of(context: Context) -> Trial:
    """Plain decoding, whole; runs held against it may be spoilt."""
    return Trial(context.corpus.model, greedy.mixed_prompts(context.prompts), PARAMS)


def accepts_one_too_many(drafts: Any, best: Any) -> Verdict:
    found = acceptance.accept_greedy(drafts, best)
    accepted = min(found.accepted + 1, len(drafts))
    return Verdict(accepted, best[accepted])


def bonus_of_the_first_row(drafts: Any, best: Any) -> Verdict:
    return Verdict(acceptance.accept_greedy(drafts, best).accepted, best[0])


def leaky(cache: Any, sequences: Any, spans: Any, device: torch.device) -> BatchLayout:
    """A mask without causality: every row sees all rows of its step."""
    layout = lay_out(cache, sequences, spans, device)
    counts = torch.tensor([end - start for start, end in spans])
    return BatchLayout(
        layout.positions,
        layout.slots,
        layout.page_table.repeat_interleave(counts, dim=0),
        layout.kv_lens.repeat_interleave(counts),
        torch.arange(len(layout.positions) + 1, dtype=torch.int32),
    )


def never_ends_inside(request: Request, tokens: Any, from_draft: int) -> Any:
    """Puts out a whole block before it looks whether the request is at its end."""
    events = []
    for index, token in enumerate(tokens):
        request.tokens.append(token)
        request.metrics.output_tokens += 1
        events.append(engine.TokenEvent(request.request_id, token, "", False, index < from_draft))
    ends = [request._reason_to_finish(token) for token in tokens]
    request.finish_reason = next((end for end in ends if end is not None), None)
    return events


ENGINE_FAULTS: dict[str, tuple[Callable[[Plant], None], str]] = {
    "one draft too many is accepted": (
        lambda plant: plant.setattr(engine, "accept_greedy", accepts_one_too_many),
        "a draft was accepted that is not the target's best token",
    ),
    "the token after a block is another row's": (
        lambda plant: plant.setattr(engine, "accept_greedy", bonus_of_the_first_row),
        "the target's own token after a block differs",
    ),
    "rows of a block see later drafts": (
        lambda plant: plant.setattr(engine, "lay_out", leaky),
        "its logits depend on the drafts",
    ),
}


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_greedy_names_a_faulty_engine(fault: str, whole: Context, monkeypatch: Plant) -> None:
    plant, cause = ENGINE_FAULTS[fault]
    trial = trial_of(whole)
    build = trial.planted(right_for=2)
    assert greedy._equal(trial, trial.run("planted", 4, build), "whole").status is Status.PASS
    plant(monkeypatch)
    item = greedy._equal(trial, trial.run("planted", 4, build), fault)
    assert item.status is Status.FAIL and cause in item.cause, item
    assert "prompt" in item.subject


def test_greedy_sees_limits_and_end_tokens_passed_over(whole: Context, monkeypatch: Plant) -> None:
    trial = trial_of(whole)
    assert said([greedy._limits(trial), greedy._end_token(trial)]) == ""
    monkeypatch.setattr(Request, "commit", never_ends_inside)
    monkeypatch.setattr(engine.Engine, "_draft_count", lambda self, r: 5 * (r.uncached == 1))
    found = said([greedy._limits(trial), greedy._end_token(trial)])
    assert "max_tokens inside a block is not respected" in found
    assert "the end token inside a block is not respected" in found


def replaced(plain: Decoded, place: int, token: int) -> Decoded:
    """The same run, but for one token of the first output."""
    request = plain.requests[0]
    other = Request(0, request.prompt, request.params)
    other.tokens = list(request.tokens)
    other.tokens[len(request.prompt) + place] = token
    return replace(plain, requests=(other, *plain.requests[1:]))


def tied(model: DeepseekV3, token: int, other: int) -> DeepseekV3:
    """The model with the same row of the head for two tokens."""
    linear = model.head.linear
    assert linear.transposed is not None
    columns = linear.transposed.clone()  # [d, vocab]
    columns[:, other] = columns[:, token]
    return replace(model, head=replace(model.head, linear=replace(linear, transposed=columns)))


def test_a_tie_is_no_fault_and_a_fault_no_tie(whole: Context) -> None:
    """The same divergence, once between tokens of one logit and once between tokens apart."""
    plain, model = whole.corpus.plain, whole.corpus.model
    best = plain.outputs[0][3]
    other = (best + 1) % model.config.vocab
    run = replaced(plain, 3, other)
    apart = greedy._classified(model, plain, run, "apart", None)
    assert apart.status is Status.FAIL and "far above what rounding can change" in apart.cause
    tie = greedy._classified(tied(model, best, other), plain, run, "tie", None)
    assert tie.status is Status.PASS and "1 of" in tie.figure, tie


# --- sampling


def always_stands(question: Any, choices: Any) -> Verdict:
    """Every draft is accepted, whatever the target says of it."""
    count = len(question.draft.tokens)
    return Verdict(count, choices.draw(question.target_probs[count]))


def test_chi_square_sees_drafts_that_always_stand(context: Context, monkeypatch: Plant) -> None:
    assert sampling._chi_square(context).status is not Status.FAIL
    monkeypatch.setitem(acceptance.ACCEPTANCE_RULES, "exact", always_stands)
    item = sampling._chi_square(context)
    assert item.status is Status.FAIL and "wrong proposal law" in item.cause, item
    exact = sampling._exact("mtp")
    assert exact.status is Status.FAIL and "acceptance is not exact" in exact.cause


def test_top_p_0_must_be_greedy(context: Context, monkeypatch: Plant) -> None:
    assert sampling._top_p_limit(context).status is Status.PASS
    real = engine.probabilities_of

    def with_a_second(logits: Any, params: SamplingParams) -> Any:
        return real(logits, replace(params, top_p=1.0, temperature=3.0))

    monkeypatch.setattr(engine, "probabilities_of", with_a_second)
    assert "the nucleus is cut wrongly" in sampling._top_p_limit(context).cause


# --- negative controls


def test_causality_sees_a_mask_that_leaks(context: Context, monkeypatch: Plant) -> None:
    assert said(controls._causality(context.corpus)) == ""
    monkeypatch.setattr(teacher, "lay_out", leaky)
    found = said(controls._causality(context.corpus))
    for what in ("target", "MTP module"):
        assert f"{what}: no row sees a later token: a later token changes earlier logits" in found


# --- path equivalence


def later_chunks_are_off(cache: Any, sequences: Any, spans: Any, device: torch.device) -> Any:
    """Positions of a chunk that does not start a prompt count from one too far."""
    layout = lay_out(cache, sequences, spans, device)
    late = torch.cat([torch.full((end - start,), start > 1) for start, end in spans])
    return replace(layout, positions=layout.positions + late.long())


def caches_mixed_up(cache: Any, sequences: Any, spans: Any, device: torch.device) -> Any:
    """In a batch, each request reads the pages of the next one."""
    layout = lay_out(cache, sequences, spans, device)
    return replace(layout, page_table=layout.page_table.roll(1, dims=0).contiguous())


def test_paths_pass_as_they_are(context: Context) -> None:
    assert said(paths.run(context)) == ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (later_chunks_are_off, "positions or cache of a later chunk are off"),
        (caches_mixed_up, "caches are mixed up"),
    ],
    ids=["chunked prefill", "batch"],
)
def test_paths_see_a_wrong_layout(
    fault: Any, words: str, context: Context, monkeypatch: Plant
) -> None:
    monkeypatch.setattr(noise, "lay_out", fault)
    assert words in said(paths.run(context))


def test_paths_see_a_wrong_attention_backend(context: Context, monkeypatch: Plant) -> None:
    real = attention.verify_attention

    def off(*arguments: Any, **options: Any) -> Any:
        out, *rest = real(*arguments, **options)
        return (out * 1.01, *rest)

    monkeypatch.setattr(attention, "verify_attention", off)
    assert "does not compute what its float64 reference does" in said(paths.run(context))


def test_paths_see_speculation_that_changes_most_texts(
    context: Context, monkeypatch: Plant
) -> None:
    monkeypatch.setattr(engine, "accept_greedy", accepts_one_too_many)
    assert "most texts differ with speculation" in said(paths.run(context))
