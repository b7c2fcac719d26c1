"""Gemma-4's assistants as drafters: drafts equal to those of transformers' class and its candidate
generator, token by token, and outputs to those of its assisted generation."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from cases import nightly_but
from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UnsupportedError
from mtp_export.inspection import inspect
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.drafters.assistant import read_assistant
from mtp_runtime.layers.tensor_parallel import TensorParallel
from mtp_runtime.models.assistant import Assistant, ClusteredHead
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from runtime.gemma import (
    KINDS,
    VOCAB,
    generated,
    share_as_before,
    write_assistant,
    write_target,
)
from runtime.harness import prompts_of

K, TOKENS = 3, 6
PROMPTS = prompts_of([1, 9, 14, 15, 16, 17, 26, 40], VOCAB)


@dataclass
class Pair:
    """A target and its assistant, transformers' models and their folders."""

    target: Any
    assistant: Any
    folder: Path

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Drafts of transformers' candidate generator after tokens, of which the target has
        computed all but the last."""
        ids = torch.tensor([tokens])
        settings = copy.deepcopy(self.target.generation_config)
        settings.max_length = 1000
        self.assistant.generation_config.num_assistant_tokens = count
        generator = SinglePositionMultiTokenCandidateGenerator(
            input_ids=ids,
            assistant_model=self.assistant,
            target_model_input_embeddings=self.target.get_input_embeddings(),
            generation_config=settings,
            model_kwargs={},
        )
        with torch.inference_mode():
            computed = self.target(
                ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True
            )
            found, _ = generator.get_candidates(
                ids,
                model_kwargs={"attention_mask": torch.ones_like(ids)},
                model_outputs=computed,
                is_first_iteration=False,
                n_last_matches=0,
            )
        drafted: list[int] = found[0, len(tokens) :].tolist()
        return drafted


@pytest.fixture(scope="module", params=nightly_but(["small"], KINDS))
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, kind = tmp_path_factory.mktemp("pair"), request.param
    with pytest.MonkeyPatch.context() as patch:
        share_as_before(patch)
        yield Pair(
            write_target(folder / "target", kind),
            write_assistant(folder / "assistant", kind),
            folder,
        )


def test_drafts_and_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch of eight and alone, before and beyond the window."""
    llm = LLM(
        pair.folder / "target",
        speculate_method="assistant",
        draft_model=pair.folder / "assistant",
        speculate_max_draft_token_num=K,
    )
    drafter, made = llm.engine.drafter, {}
    propose = drafter.propose

    def recorded(requests: Any, counts: Any) -> Any:
        drafts = propose(requests, counts)
        for one, count, draft in zip(requests, counts, drafts, strict=True):
            made[tuple(one.tokens), count] = list(draft.tokens)
        return drafts

    monkeypatch.setattr(drafter, "propose", recorded)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    outputs = [list(one.token_ids) for one in llm.generate(PROMPTS, params)]
    of_batch = dict(made)
    assert len(of_batch) >= 8 * (TOKENS - 1 - K) and len({len(one) for one, _ in of_batch}) > 8
    for (tokens, count), drafts in of_batch.items():
        assert drafts == (pair.drafts(list(tokens), count) if count else []), len(tokens)
    made.clear()
    assert list(llm.generate(PROMPTS[-1], params)[0].token_ids) == outputs[-1]
    assert made and made.items() <= of_batch.items()
    for prompt, tokens in zip(PROMPTS[::3], outputs[::3], strict=True):
        assert tokens == generated(pair.target, prompt, TOKENS, pair.assistant)
        assert tokens == generated(pair.target, prompt, TOKENS)


def test_both_folders_are_inspected(pair: Pair) -> None:
    for folder in (pair.folder / "target", pair.folder / "assistant"):
        found = inspect(folder)
        assert (found.parts, found.problems, found.unknown) == (("main",), (), "")
        assert not {"unexpected", "any"} & {amount.role for amount in found.amounts}


def test_drafts_of_a_sampling_request_have_distributions(pair: Pair) -> None:
    """A seed gives the same tokens again; tokens of clusters that were not picked are not drawn."""
    options: dict[str, Any] = {
        "speculate_method": "assistant",
        "draft_model": pair.folder / "assistant",
    }
    llm = LLM(pair.folder / "target", **options)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=5)
    first, again = (llm.generate(PROMPTS[2], params)[0].token_ids for _ in range(2))
    assert first == again
    module = cast(Assistant, cast(Any, llm.engine.drafter)._module)
    if isinstance(module.head, ClusteredHead):
        rows = torch.randn(4, 32)
        logits = module.head.logits(rows)
        theirs = pair.assistant.masked_embedding(rows[None], pair.assistant.lm_head.weight)[0]
        seen = logits.isfinite()
        assert (seen.sum(dim=1) == 3 * VOCAB // 12).all()
        torch.testing.assert_close(logits[seen], theirs[seen])
        assert torch.equal(module.head.best(rows), theirs.argmax(dim=-1))


@pytest.fixture(scope="module")
def loaded(pair: Pair) -> Loaded:
    return load_model(pair.folder / "target", LoadOptions())


def changed(folder: Path, out: Path, lacking: str = "", **fields: Any) -> Path:
    """A copy of an assistant without a tensor, or with other fields."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text()) | fields
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(lacking, None)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lacking": "post_projection.weight"}, InvalidInputError, "post_projection.weight"),
        ({"backbone_hidden_size": 48}, InvalidInputError, "another target.*backbone_hidden_size"),
        ({"model_type": "gemma4_text"}, UnsupportedError, "no assistant"),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused(
    changes: dict[str, Any],
    error: type[MtpExportError],
    words: str,
    pair: Pair,
    loaded: Loaded,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=words):
        read_assistant(changed(pair.folder / "assistant", tmp_path / "other", **changes), loaded)


def test_ranks_are_refused(pair: Pair, loaded: Loaded) -> None:
    class Two:
        is_one = False
        split = type("Split", (), {"size": 2})

    apart = replace(loaded, parallel=cast(TensorParallel, type("P", (), {"group": Two})))
    with pytest.raises(UnsupportedError, match="Ranks do not divide an assistant"):
        read_assistant(pair.folder / "assistant", apart)


def test_keys_of_another_shape_are_another_targets(tmp_path: Path, pair: Pair) -> None:
    other = write_target(tmp_path / "other", "large", global_head_dim=48)
    assert other.config.hidden_size == pair.target.config.hidden_size
    target = load_model(tmp_path / "other", LoadOptions())
    with pytest.raises(InvalidInputError, match="another target: they differ in full_attention"):
        read_assistant(pair.folder / "assistant", target)
