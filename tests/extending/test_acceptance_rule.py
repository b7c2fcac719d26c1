"""An acceptance rule is one object and one line: a toy one is registered and run end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_runtime import LLM, SamplingParams
from mtp_runtime.acceptance import ACCEPTANCE_RULES
from mtp_runtime.acceptance.base import AcceptanceRule, Block, Verdict
from mtp_runtime.sampling import Choices, Probabilities
from runtime.checkpoints import write_checkpoint

VOCAB = 96
LAST = 7


def always_the_same(logits: Any, params: SamplingParams) -> Probabilities:
    """A distribution of the rule's own: certainty of one token, whatever the model says."""
    probabilities = np.zeros(logits.shape)
    probabilities[..., LAST] = 1.0
    return probabilities


def accept_all(block: Block, choices: Choices) -> Verdict:
    count = len(block.draft.tokens)
    return Verdict(count, choices.draw(block.target_probs[count]))


def accept_none(drafts: Sequence[int], best: Sequence[int]) -> Verdict:
    return Verdict(0, LAST)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small"))


def decode(checkpoint: Path, temperature: float) -> Any:
    llm = LLM(checkpoint, speculate_method="mtp", speculate_max_draft_token_num=3, acceptance="toy")
    params = SamplingParams(temperature=temperature, max_tokens=9, ignore_eos=True, seed=1)
    (output,) = llm.generate([[5, 6, 7, 8]], params)
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_with_a_distribution_of_its_own(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Greedy requests take the same path as others if the rule has no greedy shortcut."""
    rule = AcceptanceRule(accept_all, distribution=always_the_same)
    monkeypatch.setitem(ACCEPTANCE_RULES, "toy", rule)
    output = decode(checkpoint, temperature)
    # The first token follows no draft, then blocks of 3 drafts, all accepted, and the rule's token.
    assert [output.token_ids[place] for place in (0, 4, 8)] == [LAST] * 3
    assert output.metrics.accepted == output.metrics.drafted == [2, 2, 2]


def test_a_rule_with_a_greedy_shortcut(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = AcceptanceRule(accept_all, accept_greedy=accept_none)
    monkeypatch.setitem(ACCEPTANCE_RULES, "toy", rule)
    greedy = decode(checkpoint, 0.0)
    assert set(greedy.token_ids) == {LAST} and not any(greedy.metrics.accepted)
    sampled = decode(checkpoint, 1.0)
    assert sampled.metrics.accepted == sampled.metrics.drafted
