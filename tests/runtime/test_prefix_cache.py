"""The prefix cache: tokens as without it, whatever drafts, pages shared and never lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_runtime import LLM
from mtp_runtime.cache import CachedSequence
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import TargetDraft
from mtp_runtime.drafters.eagle3 import read_eagle3
from mtp_runtime.drafters.parallel_heads import read_parallel_heads
from mtp_runtime.engine import Engine
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.prefix_cache import SharedPages
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.drafts import ffn_layout, write_eagle3, write_heads, write_layer_heads
from runtime.harness import Prompt, load, prompts_of, run

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PAGE = 16


@pytest.fixture(scope="module")
def model(small: Path) -> Model:
    return load(small)


@pytest.fixture(scope="module")
def drafts(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TargetDraft]:
    """Drafts of their own folders, by name."""
    folder, loaded = tmp_path_factory.mktemp("drafts"), load_model(small, LoadOptions())
    heads, layers = (
        write_heads(folder / "heads", ffn_layout()),
        write_layer_heads(folder / "layers"),
    )
    return {
        "eagle3": read_eagle3(write_eagle3(folder / "eagle3"), loaded),
        "ffn heads": read_parallel_heads(heads, loaded),
        "layer heads": read_parallel_heads(layers, loaded),
    }


def engine_of(
    model: Model,
    method: str = "mtp",
    k: int = 2,
    draft: TargetDraft | None = None,
    **settings: int,
) -> Engine:
    sizes = {"page_size": PAGE, "cache_tokens": 40 * PAGE} | settings
    speculation = SpeculationConfig(method=method, max_draft_tokens=k)
    config = EngineConfig(**sizes, poison_freed=True, prefix_cache=True, speculation=speculation)
    if draft is not None:
        return Engine(model.tapped(draft.taps), config, draft.build)
    return Engine(model, config, DRAFTERS[method].build)


def decode(engine: Engine, prompts: list[Prompt], params: SamplingParams = PARAMS) -> list[Request]:
    requests = [Request(number, prompt, params) for number, prompt in enumerate(prompts)]
    for _ in engine.run(requests):
        pass
    return requests


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output for request in requests]


def family(vocab: int = 96) -> list[Prompt]:
    """Prompts that begin alike: by whole pages, to a page's last token, and to the one after it."""
    base, other = prompts_of([60, 60], vocab, seed=7)
    cuts = (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 3 * PAGE, 3 * PAGE + 1)
    return [base, *(base[:cut] + other[: 50 - cut] for cut in cuts), base[: 2 * PAGE], base[:49]]


@pytest.mark.parametrize("method", ["none", "mtp", "inference_with_reference"])
@pytest.mark.parametrize("k", [1, 3])
def test_cached_requests_give_the_tokens_of_uncached_ones(
    model: Model, method: str, k: int
) -> None:
    prompts = family()
    expected = [run(model, [prompt], PARAMS).outputs[0] for prompt in prompts]
    engine = engine_of(model, method, k)
    one_by_one = [decode(engine, [prompt])[0] for prompt in prompts]
    assert outputs(one_by_one) == expected
    again = decode(engine, prompts)
    assert outputs(again) == expected
    for request in again:
        assert request.metrics.cached_tokens == (len(request.prompt) - 1) // PAGE * PAGE
    assert engine.pages.free_pages == engine.pages.pages


def test_drafts_are_those_of_an_uncached_request(model: Model) -> None:
    """The module's entries come from the cache too: its drafts, and what is accepted of them."""
    (prompt,) = prompts_of([3 * PAGE + 1], 96, seed=5)
    params = replace(PARAMS, temperature=1.0, seed=3)
    alone = run(model, [prompt], params, method="mtp", k=3).requests[0]
    engine = engine_of(model, k=3)
    first, second = (decode(engine, [prompt], params)[0] for _ in range(2))
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 3 * PAGE)
    assert first.output == second.output == alone.output
    assert first.metrics.accepted == second.metrics.accepted == alone.metrics.accepted


@pytest.mark.parametrize("name", ["eagle3", "ffn heads", "layer heads"])
def test_drafts_of_their_own_folder_find_their_entries(
    model: Model, drafts: dict[str, TargetDraft], name: str
) -> None:
    (prompt,) = prompts_of([3 * PAGE + 1], 96, seed=5)
    params = replace(PARAMS, temperature=1.0, seed=3)
    method = "eagle3" if name == "eagle3" else "parallel_heads"
    engine = engine_of(model, method, k=2, draft=drafts[name])
    first, second = (decode(engine, [prompt], params)[0] for _ in range(2))
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 3 * PAGE)
    assert first.output == second.output
    assert first.metrics.accepted == second.metrics.accepted


@pytest.mark.parametrize(
    ("place", "pages"), [(PAGE - 1, 0), (PAGE, 0), (PAGE + 1, 1), (2 * PAGE, 1), (2 * PAGE + 1, 2)]
)
def test_the_token_after_a_page_is_part_of_its_key(model: Model, place: int, pages: int) -> None:
    """The module's last entry of a page depends on it."""
    (prompt,) = prompts_of([2 * PAGE + 4], 96)
    engine = engine_of(model)
    decode(engine, [prompt])
    other = (*prompt[:place], (prompt[place] + 1) % 96, *prompt[place + 1 :])
    (found,) = decode(engine, [other])
    assert found.metrics.cached_tokens == pages * PAGE
    assert found.output == run(model, [other], PARAMS).outputs[0]


def test_a_request_that_ends_at_once_leaves_its_pages(model: Model) -> None:
    (prompt,) = prompts_of([3 * PAGE + 1], 96, seed=5)
    params = replace(PARAMS, temperature=1.0, seed=3)
    alone = run(model, [prompt], params, method="mtp", k=3).requests[0]
    engine = engine_of(model, k=3)
    decode(engine, [prompt], replace(params, max_tokens=1))
    (found,) = decode(engine, [prompt], params)
    assert found.metrics.cached_tokens == 3 * PAGE
    assert (found.output, found.metrics.accepted) == (alone.output, alone.metrics.accepted)


def test_an_answer_is_found_by_the_next_turn(model: Model) -> None:
    (prompt,) = prompts_of([20], 96)
    engine = engine_of(model)
    (first,) = decode(engine, [prompt], replace(PARAMS, max_tokens=30))
    turn = (*first.tokens, 5, 6, 7)
    (second,) = decode(engine, [turn])
    assert second.metrics.cached_tokens == 3 * PAGE
    assert second.output == run(model, [turn], PARAMS).outputs[0]


def test_a_preempted_request_finds_its_own_pages(model: Model) -> None:
    prompts = prompts_of([2 * PAGE + 1, 2 * PAGE + 3], 96, seed=3)
    params = replace(PARAMS, max_tokens=40)
    engine = engine_of(model, k=1, cache_tokens=7 * PAGE)
    requests = decode(engine, prompts, params)
    assert sum(request.metrics.preemptions for request in requests) > 0
    assert outputs(requests) == [run(model, [p], params).outputs[0] for p in prompts]
    assert [request.metrics.cached_tokens for request in requests] == [0, 0], "not of the prompt"


def test_no_page_is_lost_under_random_aborts(model: Model) -> None:
    """Every page is free or held at every step, and what is not aborted is answered as alone."""
    random = Random(0)
    prompts = family()
    expected = {prompt: run(model, [prompt], PARAMS).outputs[0] for prompt in prompts}
    engine = engine_of(model, cache_tokens=20 * PAGE, max_batch_size=4)
    live: list[Request] = []
    done: list[Request] = []
    for number in range(160):
        if random.random() < 0.5:
            live.append(Request(number, random.choice(prompts), PARAMS))
            engine.add(live[-1])
        if live and random.random() < 0.15:
            engine.abort([random.choice(live)])
        if engine.has_work:
            engine.step()
        held = {page for request in live for page in request.cached.pages}
        assert len(held) == engine.pages.pages - engine.pages.free_pages
        done += [request for request in live if request.finish_reason is not None]
        live = [request for request in live if request.finish_reason is None]
    engine.abort(live)
    assert engine.pages.free_pages == engine.pages.pages
    assert Counter(r.finish_reason for r in done).keys() == {"abort", "length"}
    for request in done:
        if request.finish_reason == "length":
            assert request.output == expected[request.prompt]


def test_pages_are_evicted_oldest_first_and_last_pages_before_first_ones() -> None:
    pages = SharedPages(6, 2)
    old, new, third = CachedSequence(), CachedSequence(), CachedSequence()
    for sequence, first in ((old, 10), (new, 20)):
        pages.append(sequence, 4)
        pages.remember(sequence, [first, first + 1, first + 2, first + 3, 0])
        pages.truncate(sequence, 0)
    assert pages.free_pages == 6
    pages.append(third, 6)  # two free pages, and the old one's second

    def found(first: int) -> int:
        sequence = CachedSequence()
        pages.adopt(sequence, [first, first + 1, first + 2, first + 3, 0])
        length = sequence.length
        pages.truncate(sequence, 0)
        return length

    assert (found(10), found(20)) == (2, 4)


def test_what_no_prefix_cache_works_with_is_refused(model: Model, trained: Path) -> None:
    two = replace(model, mtp_modules=model.mtp_modules * 2)
    with pytest.raises(UnsupportedError, match="several MTP modules"):
        engine_of(two)
    with pytest.raises(UsageError, match="no prefix cache"):
        LLM(trained, speculate_method="draft_model", draft_model=trained, prefix_cache=True)
