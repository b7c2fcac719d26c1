"""The prefix cache of models with states: tokens as without it, whatever drafts, and memory within
that of the pages."""

from __future__ import annotations

from random import Random

import pytest

from mtp_runtime.cache import PageAllocator
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.engine import Engine
from mtp_runtime.memory import state_pages
from mtp_runtime.models.model import Model
from mtp_runtime.prefix_states import CHECKPOINT_TOKENS, SharedStates
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.harness import Prompt, load, prompts_of, run

PAGE = 16
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = SMALL_CONFIGS["qwen3_5_text"] | {"vocab_size": 4, "eos_token_id": None}
    return load(write_checkpoint(tmp_path_factory.mktemp("states"), config))


def engine_of(model: Model, method: str, k: int, pages: int, **settings: int) -> Engine:
    speculation = SpeculationConfig(method=method, max_draft_tokens=k)
    sizes = {"page_size": PAGE, "cache_tokens": pages * PAGE} | settings
    config = EngineConfig(**sizes, poison_freed=True, prefix_cache=True, speculation=speculation)
    return Engine(model, config, DRAFTERS[method].build)


def decode(engine: Engine, prompts: list[Prompt]) -> list[Request]:
    requests = [Request(number, prompt, PARAMS) for number, prompt in enumerate(prompts)]
    for _ in engine.run(requests):
        pass
    return requests


def logprobs_of(request: Request) -> list[float]:
    """Log-probability of every token of the output: a wrong state shows where tokens do not."""
    return [entry.logprob for entry in request.logprobs]


def states_of(engine: Engine) -> SharedStates:
    assert isinstance(engine.pages, SharedStates)
    return engine.pages


@pytest.mark.parametrize(("method", "k"), [("none", 1), ("mtp", 3)])
def test_tokens_are_those_without_it(model: Model, method: str, k: int) -> None:
    """Prompts that begin alike, then each with its output and more, in chunks of any size."""
    stem = prompts_of([50], 4)[0]
    prompts = [stem[:length] + prompts_of([7], 4, seed=length)[0] for length in (50, 48, 33, 31)]
    each = state_pages(model, PAGE)
    engine = engine_of(model, method, k, 80 * max(1, each), prefill_chunk=24)
    for turn in range(3):
        cold = run(model, prompts, PARAMS, method=method, k=k, prefill_chunk=24).requests
        expected = [request.output for request in cold]
        for prompt, other in zip(prompts, cold, strict=True):
            (request,) = decode(engine, [prompt])
            assert request.output == other.output
            assert logprobs_of(request) == pytest.approx(logprobs_of(other), abs=1e-4)
            adopted = request.metrics.cached_tokens
            assert adopted % PAGE == 0
            if turn:
                assert adopted >= (len(prompt) - 30) // PAGE * PAGE > 0
        more = prompts_of([9], 4, seed=turn)[0]
        prompts = [(*p, *out, *more) for p, out in zip(prompts, expected, strict=True)]
    assert states_of(engine).checkpoints


def test_a_prompt_comes_again_from_its_last_full_page(model: Model) -> None:
    engine = engine_of(model, "mtp", 2, 80 * state_pages(model, PAGE))
    (prompt,) = prompts_of([75], 4, seed=1)
    first, again = (decode(engine, [prompt])[0] for _ in range(2))
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens) == (0, 64)
    assert first.output == again.output


def test_memory_is_bounded(model: Model) -> None:
    """Many prompts through few pages: what is kept goes first, and nothing is lost."""
    each = state_pages(model, PAGE)
    pages = 8 + 3 * each
    engine, random = engine_of(model, "mtp", 2, pages), Random(0)
    prompts = prompts_of([random.randrange(17, 60) for _ in range(24)], 4, seed=3)
    prompts += [prompt[:40] + prompts_of([5], 4, seed=9)[0] for prompt in prompts]
    expected = run(model, prompts, PARAMS, method="mtp", k=2).outputs
    for start in range(0, len(prompts), 4):
        requests = decode(engine, prompts[start : start + 4])
        assert [r.output for r in requests] == expected[start : start + 4]
        kept = states_of(engine)
        assert kept.free_pages == pages  # those that are kept are given when they are wanted
        assert 0 < kept.checkpoints * each <= pages // 4 + each
        assert kept.checkpoints * each <= PageAllocator.free_pages.__get__(kept)


def test_checkpoints_are_taken_every_so_many_tokens() -> None:
    """Beside the one at the last full page of a prompt."""
    assert CHECKPOINT_TOKENS % 64 == 0
    pages = SharedStates(100, PAGE, states=1, state_pages=1)
    assert pages.chunk(0, 256, 300) == 256
    assert pages.chunk(256, 44, 300) == 288 - 256
    assert pages.chunk(288, 12, 300) == 12
    assert pages.chunk(0, 16, 16) == 16
