"""A drafter is one class and one line: a toy one is registered and run end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mtp_checkpoints.errors import UsageError
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import DrafterParts, DrafterType, Pass
from mtp_runtime.request import Request
from runtime.checkpoints import write_checkpoint

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10]]


class NextId:
    """Drafts the ids after the last token's."""

    def __init__(self, parts: DrafterParts) -> None:
        self.parts = parts
        self.observed = self.forgotten = 0

    def observe(self, passes: Sequence[Pass]) -> None:
        self.observed += len(passes)

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        vocab = self.parts.target.config.vocab
        return [
            Draft(tuple((request.tokens[-1] + 1 + i) % vocab for i in range(count)))
            for request, count in zip(requests, counts, strict=True)
        ]

    def forget(self, request: Request) -> None:
        self.forgotten += 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small"))


def test_a_drafter_end_to_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "next_id", DrafterType(NextId))
    expected = LLM(checkpoint).generate(PROMPTS, PARAMS)
    llm = LLM(checkpoint, speculate_method="next_id", speculate_max_draft_token_num=3)
    found = llm.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert all(output.metrics.drafted[2] > 0 for output in found)
    drafter = llm.engine.drafter
    assert isinstance(drafter, NextId) and drafter.observed and drafter.forgotten == 2
    assert drafter.parts.target.mtp is None, "it needs no MTP modules, so that none are loaded"


def test_a_drafter_says_what_is_loaded_for_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = DrafterType(NextId, needs_mtp=True, needs_draft_model=True)
    monkeypatch.setitem(DRAFTERS, "next_id", both)
    llm = LLM(checkpoint, speculate_method="next_id", draft_model=checkpoint)
    drafter = llm.engine.drafter
    assert isinstance(drafter, NextId)
    assert drafter.parts.target.mtp is not None and drafter.parts.draft_model is not None
    monkeypatch.setitem(DRAFTERS, "next_id", DrafterType(NextId))
    with pytest.raises(UsageError, match="speculate_method"):
        LLM(checkpoint, speculate_method="next_id", draft_model=checkpoint)
