"""Drafting a recursion in one compiled call gives what drafting token by token does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from mtp_checkpoints.families.contract import Hidden, MtpContract
from mtp_kernels.cpu.team import Team
from mtp_kernels.decoder import Recursion
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.drafters.base import DrafterParts
from mtp_runtime.drafters.chain import Chain
from mtp_runtime.drafters.eagle3 import Eagle3Drafter, read_eagle3
from mtp_runtime.drafters.mtp import ModuleDrafter, MtpDrafter
from mtp_runtime.models.compiled import stacked
from mtp_runtime.models.eagle3 import Eagle3Module
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL
from runtime.drafts import DRAFT_VOCAB, write_eagle3
from runtime.harness import load, prompts_of, run

LENGTHS = [1, 2, 14, 15, 16, 17, 40]  # about pages of 16


class Both(ModuleDrafter):
    """Drafts twice from the same state, and compares drafts and caches."""

    compared = 0

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        layers = stacked(self._caches[0])
        self._pages.fill_freed()
        before = layers.clone()
        at_once = super().propose(requests, counts)
        self._pages.fill_freed()
        after = layers.clone()
        layers.copy_(before)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(self._modules[0].__dict__, "recursion", None)  # a cached property
            by_steps = super().propose(requests, counts)
        self._pages.fill_freed()
        assert [draft.tokens for draft in at_once] == [draft.tokens for draft in by_steps]
        assert torch.equal(after.view(torch.int32), layers.view(torch.int32))
        Both.compared += max(counts) > 1
        return by_steps


class BothMtp(Both, MtpDrafter):
    pass


class BothEagle3(Both, Eagle3Drafter):
    pass


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("draft_vocab", [DRAFT_VOCAB, SMALL["vocab_size"]])
def test_drafts_and_cache_of_eagle3(
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draft_vocab: int,
    normed: bool,
    threads: int,
) -> None:
    """With a head over some tokens and over all, and on either side of its norms."""
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    monkeypatch.setattr(Both, "compared", 0)
    changes = {"norm_output": normed, "norm_before_residual": normed, "fc_norm": normed}
    folder = write_eagle3(tmp_path, draft_vocab=draft_vocab, **changes)
    loaded = load_model(small, LoadOptions())
    draft = read_eagle3(folder, loaded)
    model, module = loaded.model.tapped(draft.taps), draft.weights
    assert isinstance(module, Eagle3Module)
    build = partial(BothEagle3, module=module)
    params = [SamplingParams(max_tokens=count) for count in (3, 4, 6, 9, 12, 5, 7)]
    run(model, prompts_of(LENGTHS, 96), params, k=5, build=build)
    assert Both.compared > 5


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("recycled", list(Hidden))
def test_drafts_and_cache(
    small: Path, monkeypatch: pytest.MonkeyPatch, recycled: Hidden, threads: int
) -> None:
    """Requests of all lengths that end at different times, so that fewer and fewer go on."""
    monkeypatch.setattr(Team, "threads_for", staticmethod(lambda multiplications: threads))
    monkeypatch.setattr(Both, "compared", 0)
    contract = MtpContract(recycled_hidden=recycled)
    model = load_model(small, LoadOptions(contract=contract)).model
    params = [SamplingParams(max_tokens=count) for count in (3, 4, 6, 9, 12, 5, 7)]
    run(model, prompts_of(LENGTHS, 96), params, method="mtp", k=5, build=BothMtp)
    assert Both.compared > 5


def test_more_rows_than_a_block(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 requests: products take blocks of 32 rows."""
    monkeypatch.setattr(Both, "compared", 0)
    params = [SamplingParams(max_tokens=4 + number % 3) for number in range(40)]
    run(load(small), prompts_of([20] * 40, 96), params, k=3, build=BothMtp)
    assert Both.compared


def test_trained_model(trained_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are accepted here, and many parts of attention are joined."""
    monkeypatch.setattr(Both, "compared", 0)
    params = SamplingParams(max_tokens=24)
    run(
        trained_model, prompts_of([20, 130], trained_model.config.vocab), params, k=4, build=BothMtp
    )
    assert Both.compared > 3


class Watched(MtpDrafter):
    """Notes whether the requests of each way to grow are greedy; all get the drafts they are to."""

    at_once: set[bool]
    by_steps: set[bool]

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        drafts = super().propose(requests, counts)
        assert [len(draft.tokens) for draft in drafts] == list(counts)
        return drafts

    def _grow_at_once(self, chains: list[Chain], recursion: Recursion) -> None:
        Watched.at_once |= {chain.request.params.greedy for chain in chains}
        super()._grow_at_once(chains, recursion)

    def _grow_by_steps(self, chains: list[Chain]) -> None:
        Watched.by_steps |= {chain.request.params.greedy for chain in chains}
        super()._grow_by_steps(chains)


def test_sampling_requests_draft_step_by_step(small: Path) -> None:
    """Their drafts are drawn from distributions, which the compiled call does not make."""
    Watched.at_once, Watched.by_steps = set(), set()
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    ]
    run(load(small), prompts_of([5, 5], 96), params, k=3, build=Watched)
    assert Watched.at_once == {True}
    assert False in Watched.by_steps


def test_nothing_to_draft(small: Path) -> None:
    drafters = []

    def build(parts: DrafterParts) -> MtpDrafter:
        drafters.append(MtpDrafter(parts))
        return drafters[-1]

    run(load(small), prompts_of([5], 96), SamplingParams(max_tokens=2), k=3, build=build)
    assert drafters[0].propose([], []) == []
