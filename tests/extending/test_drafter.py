"""A drafter is one class and one line: a toy one is registered and run end to end, and one with
weights in a folder of its own, which a bundle then holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import export, run_program
from faults.matrix import no_progress
from mtp_checkpoints.errors import UsageError
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import acceptance, greedy, speed
from mtp_export.verify.files import checksums
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.weights import load_report
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.cache import JoinedCaches
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import (
    DrafterParts,
    DrafterType,
    ForcedTexts,
    Pass,
    ScoredVariant,
    TargetDraft,
)
from mtp_runtime.models.load import Loaded
from mtp_runtime.request import Request
from mtp_runtime.teacher_forcing import token_scores
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


@dataclass(frozen=True)
class Offsets:
    """Weights of a toy draft: what is added to a token's id for each draft after it."""

    offsets: torch.Tensor

    def new_cache(self, pages: object) -> JoinedCaches:
        return JoinedCaches(())


class ByOffsets(NextId):
    """Drafts the last token's id plus offsets of its own."""

    def __init__(self, parts: DrafterParts, weights: Offsets | None = None) -> None:
        super().__init__(parts)
        assert weights is not None, "it is read from its folder"
        self.offsets = weights.offsets.tolist()

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        vocab = self.parts.target.config.vocab
        return [
            Draft(tuple((request.tokens[-1] + o) % vocab for o in self.offsets[:count]))
            for request, count in zip(requests, counts, strict=True)
        ]


def read_offsets(folder: Path, loaded: Loaded) -> TargetDraft:
    tensors = load_file(folder / "model.safetensors")
    weights = Offsets(tensors["offsets"])
    return TargetDraft(
        partial(ByOffsets, weights=weights), weights, len(tensors), variants=worse_and_better
    )


def worse_and_better(texts: ForcedTexts) -> Iterator[ScoredVariant]:
    """The target's own head as a variant, beside a draft that is always wrong."""
    head, rows = texts.model.head, texts.everywhere.rows
    scores = token_scores(head, texts.states[1][rows + 1], texts.choices[rows + 1])
    yield ScoredVariant("head", "the head is read", "it reads no head", scores, scores - 1)


@pytest.fixture
def with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = partial(ByOffsets, weights=Offsets(torch.tensor([1, 2])))
    kind = DrafterType(ByOffsets, read=read_offsets, toy=toy, draws=False)
    monkeypatch.setitem(DRAFTERS, "offsets", kind)


@pytest.fixture
def bundle(checkpoint: Path, tmp_path: Path, with_weights: None) -> Path:
    """An export, and a draft that was written beside its parts."""
    output = tmp_path / "bundle"
    assert export(checkpoint, output, "--link", "copy", "--quiet").code == 0
    (output / "offsets").mkdir()
    (output / "offsets/config.json").write_text("{}")
    save_file({"offsets": torch.tensor([1, 2, 3])}, output / "offsets/model.safetensors")
    return output


def test_a_drafter_with_weights_of_its_own(bundle: Path) -> None:
    """Its folder is found, read, verified, diagnosed and drafted with, by its line alone."""
    options = VerifyOptions(bundle, level=Level.RUN, max_new_tokens=8, ks=(2,))
    context = Context.open(options, no_progress)
    found = {item.name: item for item in _items(context)}
    assert found["offsets: checksums"].cause == "the manifest does not list this draft"
    assert found["offsets: runtime loads it, every tensor explained"].status is Status.PASS
    assert found["offsets, k=2, draft 1"].figure
    diagnosis = found["offsets: no other reading drafts better"]
    assert diagnosis.status is Status.FAIL and "it reads no head" in diagnosis.cause
    assert found["offsets, batch 1, k=2"].data["method"] == "offsets"
    trial = greedy.Trial(context.corpus.model, greedy.mixed_prompts(context.prompts)[:2], PARAMS)
    name, decoded = greedy._of_extra(trial, context.extra_draft("offsets"))
    assert greedy._equal(trial, decoded, name).status is Status.PASS
    found_tokens = LLM(bundle, speculate_method="offsets").generate(PROMPTS, PARAMS)
    expected = LLM(bundle).generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in found_tokens] == [o.token_ids for o in expected]
    assert all(output.metrics.drafted for output in found_tokens)


def _items(context: Context) -> Iterator[Item]:
    for run in (
        checksums.opened,
        checksums.run,
        load_report.extra_drafts,
        acceptance.extra_drafts,
        speed.run,
    ):
        yield from run(context)


def test_generate_takes_a_drafter_with_weights(bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7, 8]}\n')
    done = run_program(
        *("generate", bundle, "--speculate-method", "offsets", "--prompts", prompts),
        *("--max-new-tokens", "4", "--json"),
    )
    assert done.code == 0, done
