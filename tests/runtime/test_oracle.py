"""The model against transformers' DeepseekV3ForCausalLM on the same files, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from mtp_runtime.models.model import Model
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import YARN
from runtime.harness import Walk, load, prompts_of, run

TOLERANCE = 1e-4


def oracle(path: Path) -> Any:
    return DeepseekV3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference(trained_dense: Path) -> Any:
    return oracle(trained_dense)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": YARN},
        {"q_lora_rank": None},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        {"n_shared_experts": 2},
        {"first_k_dense_replace": 0, "norm_topk_prob": False},
    ],
    ids=["plain", "yarn", "no q lora", "one group", "two shared experts", "all sparse"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_variants(variant: Callable[..., Path], changes: Any, compiled: bool) -> None:
    path = variant(**changes)
    reference, model = oracle(path), load(path, compiled=compiled)
    (tokens,) = prompts_of([150], 96)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    whole = Walk(model).feed(tokens)[0]
    assert relative_error(whole, expected) <= TOLERANCE
    walk = Walk(model)
    parts = [tokens[:120], *([token] for token in tokens[120:])]
    assert relative_error(torch.cat([walk.feed(p)[0] for p in parts]), expected) <= TOLERANCE


@pytest.mark.parametrize("compiled", [False, True])
def test_trained(trained: Path, trained_model: Model, reference: Any, compiled: bool) -> None:
    """Prefill in whole and in chunks, then single steps: every logit of every position."""
    model = trained_model if compiled else load(trained, compiled=False)
    (tokens,) = prompts_of([48], 2048)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert relative_error(Walk(model).feed(tokens)[0], expected) <= TOLERANCE
    walk = Walk(model)
    parts = [tokens[:33], tokens[33:40], *([token] for token in tokens[40:])]
    assert relative_error(torch.cat([walk.feed(p)[0] for p in parts]), expected) <= TOLERANCE


def test_generate_is_token_exact(trained_model: Model, reference: Any) -> None:
    prompts = prompts_of([5, 17], 2048, seed=1)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    # transformers forbids the end token up to min_new_tokens, the runtime goes on after it.
    assert all(1 not in output for output in expected), "choose other prompts"
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert run(trained_model, prompts, params).outputs == expected


def test_mtp_acceptance_equals_transformers(
    trained_model: Model, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' generate(use_mtp=True) drafts one token a step: it takes as many steps."""
    calls: list[int] = []
    forward = reference.model.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*arguments, **options)

    monkeypatch.setattr(reference.model, "forward", counted)
    for prompt in prompts_of([9, 20], 2048, seed=2):
        ids = torch.tensor([prompt])
        calls.clear()
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_mtp=True,
            max_new_tokens=16,
            pad_token_id=0,
        )
        expected = out[0, len(prompt) :].tolist()
        params = SamplingParams(max_tokens=len(expected))
        ours = run(trained_model, [prompt], params, method="mtp", k=1, eos=(1,))
        assert ours.outputs[0] == expected
        assert ours.requests[0].metrics.target_steps == len(calls)
