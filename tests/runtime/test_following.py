"""An LLM on several ranks: rank 0 takes the requests, and one message per step lets the others
compute it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime import LLM
from mtp_runtime.config import LLMOptions
from mtp_runtime.llm import llm_of
from mtp_runtime.parallel.group import Group
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import write_checkpoint
from runtime.harness import prompts_of
from runtime.ranks import ranks

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
EAGLE: dict[str, Any] = {
    "speculate_method": "eagle",
    "speculate_max_draft_token_num": 2,
    "prefix_cache": True,
    "page_size": 16,
}


@pytest.fixture
def group() -> Iterator[Group]:
    with ranks(2) as group:
        yield group


def test_requests_come_and_go(group: Group, tmp_path: Path) -> None:
    """Prompts that the prefix cache knows, seeds that nobody gave, and a request that is aborted
    while others go on."""
    folder = write_checkpoint(tmp_path)
    llm, alone = group.everywhere(llm_of, folder, LLMOptions(**EAGLE)), LLM(folder, **EAGLE)
    prompts = prompts_of([40, 41], 96)
    for params in (GREEDY, GREEDY):
        outputs = [o.token_ids for o in llm.generate(prompts, params)]
        assert outputs == [o.token_ids for o in alone.generate(prompts, params)]

    sampled = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0)
    (left, kept) = llm.requests(prompts_of([5, 7], 96, seed=1), [sampled] * 2)
    with closing(llm.engine.run([left])) as events:
        llm.engine.add(kept)
        next(events)
    assert left.finish_reason == "abort"
    llm.engine.abort(llm.requests([(1, 2)], [sampled]))  # which never came
    before, steps = group.calls["message from rank 0"], 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    assert group.calls["message from rank 0"] - before == steps, "one message a step"
    seeded = SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=kept.seed)
    assert tuple(kept.output) == alone.generate([kept.prompt], seeded)[0].token_ids
    pages = llm.engine.pages
    assert pages.free_pages == pages.pages


def test_drafts_by_measured_times_and_an_end_by_text(group: Group, trained_glm: Path) -> None:
    """Rank 0's times choose the number of drafts, and its text ends a request, on every rank."""
    options = LLMOptions(speculate_method="mtp", adaptive=True, speculate_max_draft_token_num=3)
    llm = group.everywhere(llm_of, trained_glm, options)
    alone = LLM(trained_glm, speculate_method="none")
    prompts = ["Once upon a time", "def add(a, b):", "The cat"]
    (whole, *_) = alone.generate(prompts[:1], SamplingParams(max_tokens=24))
    params = SamplingParams(max_tokens=24, stop=whole.text[len(whole.text) // 2 :][:3])
    found, wanted = llm.generate(prompts, params), alone.generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert found[0].finish_reason == "stop" and len(found[0].token_ids) < 24
