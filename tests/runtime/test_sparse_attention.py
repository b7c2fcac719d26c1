"""DeepSeek-V3.2 and GLM-5 against transformers in contexts of more tokens than indexers choose.

A small index_topk makes short contexts long ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError, UsageError
from mtp_checkpoints.families import family_of
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.drafts import write_eagle3, write_layer_heads
from runtime.harness import Walk, load, prompts_of, run
from runtime.oracles import oracle

TOLERANCE = 1e-4
TOPK, LONGEST = 16, 200
# With many heads no two tokens have a score of 0, of which either may be chosen.
SMALL_TOPK: dict[str, Any] = {"index_topk": TOPK, "index_n_heads": 16}
MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")


def checkpoint(folder: Path, model_type: str, **changes: Any) -> Path:
    return write_checkpoint(folder, SMALL_CONFIGS[model_type] | SMALL_TOPK | changes)


def sparse(path: Path, *, compiled: bool = True, longest: int = LONGEST) -> Model:
    options = LoadOptions(dequantize_at_load=compiled, max_model_len=longest)
    return load_model(path, options).model


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found - expected).abs().amax(-1) / expected.abs().max()


def logits_of(reference: Any, tokens: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.as_tensor(reference(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one prefill, in chunks, and token by token; GLM's third layer shares a choice."""
    path = checkpoint(tmp_path, model_type)
    (tokens,) = prompts_of([150], 96)
    expected = logits_of(oracle(path, monkeypatch), tokens)
    dense = Walk(load(path)).feed(tokens)[0]
    assert row_errors(dense, expected)[:TOPK].max() <= TOLERANCE
    assert row_errors(dense, expected).max() > 100 * TOLERANCE
    for compiled, chunk in ((True, 150), (False, 150), (True, 40), (True, 1)):
        walk = Walk(sparse(path, compiled=compiled))
        parts = [walk.feed(tokens[start : start + chunk])[0] for start in range(0, 150, chunk)]
        assert row_errors(torch.cat(parts), expected).max() <= TOLERANCE, (compiled, chunk)


def test_the_rotation_follows_config(tmp_path: Path) -> None:
    (tokens,) = prompts_of([60], 96)
    found = []
    for number, changes in enumerate(({}, {"indexer_rope_interleave": True})):
        path = checkpoint(tmp_path / str(number), "deepseek_v32", **changes)
        found.append(Walk(sparse(path)).feed(tokens)[0])
    assert row_errors(*found)[:TOPK].max() == 0
    assert row_errors(*found).max() > 100 * TOLERANCE


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_with_drafts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens equal transformers', in a batch of several and with drafts of the MTP layer."""
    path = checkpoint(tmp_path, model_type, vocab_size=4, eos_token_id=None)
    reference, model = oracle(path, monkeypatch), sparse(path)
    prompts = prompts_of([9, 31, 42], 4, seed=2)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    assert run(model, prompts, params).outputs == expected
    drafted = run(model, prompts, params, method="mtp", k=3)
    assert drafted.outputs == expected
    assert all(request.metrics.drafted[2] for request in drafted.requests)


def test_a_choice_of_all_tokens_is_dense_attention(tmp_path: Path) -> None:
    """MTP layer included: the same drafts are accepted."""
    path = checkpoint(tmp_path, "glm_moe_dsa", index_topk=64, vocab_size=4, eos_token_id=None)
    prompts = prompts_of([9, 20], 4, seed=2)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found = [run(model, prompts, params, method="mtp", k=2) for model in (load(path), sparse(path))]
    accepted = [[request.metrics.accepted for request in one.requests] for one in found]
    assert (found[0].outputs, accepted[0]) == (found[1].outputs, accepted[1])


def test_bounds_of_contexts(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "deepseek_v32")
    (prompt,) = prompts_of([40], 96)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert len(run(sparse(path, longest=48), [prompt], params).outputs[0]) == 8
    for model, words in (
        (sparse(path, longest=47), "at most 47 together, max_model_len"),
        (load(path), f"at most {TOPK} together, index_topk of config.json: with max_model_len"),
    ):
        with pytest.raises(UsageError, match=words):
            run(model, [prompt], params)
    for longest in (0, 513):
        with pytest.raises(UsageError, match="max_model_len of 1 to 512"):
            sparse(path, longest=longest)
    with pytest.raises(UnsupportedError, match="attention SparseMla"):
        load_model(path, LoadOptions(deterministic=True, max_model_len=LONGEST))


def test_the_command_takes_long_contexts(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", "glm_moe_dsa")
    (prompt,) = prompts_of([40], 96)
    expected = run(sparse(path), [prompt], SamplingParams(max_tokens=4)).outputs[0]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": prompt}))
    arguments = ("generate", path, "--prompts", prompts, "--max-new-tokens", 4, "--json")
    refused = run_program(*arguments)
    assert (refused.code, "max_model_len" in refused.err) == (2, True)
    outcome = run_program(*arguments, "--max-model-len", 64)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["outputs"][0]["token_ids"] == expected


def test_the_first_layer_shares_no_choice() -> None:
    kinds = {"indexer_types": ["shared", "full", "full"]}
    with pytest.raises(InvalidInputError, match="first full"):
        _ = family_of(SMALL_CONFIGS["glm_moe_dsa"] | kinds).tensors


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_beyond_the_releases_2048_tokens(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of scores, a few lie too close for two computations to rank them alike."""
    changes = {"index_topk": 2048, "max_position_embeddings": 4096}
    path = checkpoint(tmp_path, model_type, **changes)
    (tokens,) = prompts_of([2300], 96)
    expected = logits_of(oracle(path, monkeypatch), tokens)
    walk = Walk(sparse(path, longest=2300), page_size=128)
    parts = [walk.feed(tokens[start : start + 256])[0] for start in range(0, 2300, 256)]
    errors = row_errors(torch.cat(parts), expected)
    assert errors[:2048].max() <= TOLERANCE
    assert (errors[2048:] <= TOLERANCE).float().mean() > 0.9
    assert errors.max() <= 100 * TOLERANCE


def test_drafts_beside_a_shared_choice(tmp_path: Path) -> None:
    """Taps cut the layers right before the one that shares its tokens with the layer before."""
    path = checkpoint(tmp_path / "target", "glm_moe_dsa")
    draft = write_eagle3(tmp_path / "draft", SMALL_CONFIGS["glm_moe_dsa"] | SMALL_TOPK)
    prompts, params = prompts_of([40, 18], 96), SamplingParams(max_tokens=12, ignore_eos=True)
    plain = LLM(path, max_model_len=LONGEST).generate(prompts, params)
    drafting = LLM(
        path,
        max_model_len=LONGEST,
        speculate_method="eagle3",
        speculate_max_draft_token_num=2,
        draft_model=draft,
    )
    outputs = drafting.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_heads_like_a_layer_without_an_indexer(tmp_path: Path) -> None:
    """They are refused where contexts are sparse, and draft where no context is."""
    path = checkpoint(tmp_path / "target", "glm_moe_dsa")
    draft = write_layer_heads(tmp_path / "draft", SMALL_CONFIGS["glm_moe_dsa"] | SMALL_TOPK)
    options: dict[str, Any] = {"speculate_method": "parallel_heads", "draft_model": draft}
    with pytest.raises(UnsupportedError, match="have no indexer"):
        LLM(path, max_model_len=LONGEST, **options)
    prompts, params = prompts_of([3, 5], 96), SamplingParams(max_tokens=TOPK - 5, ignore_eos=True)
    outputs = LLM(path, speculate_max_draft_token_num=2, **options).generate(prompts, params)
    plain = LLM(path).generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
