"""Grouped-query layers on the compiled kernels: tokens of torch, with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from fixtures.tiny.prompts import prompt_ids, read_prompts
from mtp_runtime import SamplingParams
from mtp_runtime.models.compiled import CompiledLayers
from mtp_runtime.models.execution import TorchLayers
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from runtime.checkpoints import GLM4_MOE, write_checkpoint
from runtime.harness import Prompt, Walk, load, prompts_of, run

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TRAINED = FIXTURES / "glm4-moe-tiny"
VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "without norms": {"use_qk_norm": False},
    "without biases": {"attention_bias": False},
    "one key": {"num_key_value_heads": 1},
    "a key for each head": {"num_key_value_heads": 8, "head_dim": 24},
}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    lines = read_prompts(FIXTURES / "prompts.jsonl")[::20]
    return [tuple(prompt_ids(tokenizer, line["kind"], line["prompt"])) for line in lines]


def compiled(path: Path, dtype: str = "float32") -> Model:
    """The model, no layer of which torch runs."""
    model = load_model(path, LoadOptions(dtype=dtype, deterministic=True)).model
    assert isinstance(model.layers, CompiledLayers)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_the_trained_one(prompts: list[Prompt], dtype: str) -> None:
    """Its weights are stored in bf16, so that both dtypes of packed weights hold them exactly."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    by_torch = load(TRAINED, compiled=False)
    assert isinstance(by_torch.layers, TorchLayers)
    expected = run(by_torch, prompts, params, method="mtp", k=2)
    model = compiled(TRAINED, dtype)
    assert model.mtp is not None and model.mtp.recursion is not None
    found = run(model, prompts, params, method="mtp", k=2)
    assert found.outputs == expected.outputs
    assert found.counts("accepted", 1) == expected.counts("accepted", 1) > 0
    assert run(model, prompts, params).outputs == expected.outputs


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_of_random_ones(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, GLM4_MOE | VARIANTS[name])
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = prompts_of([5, 70, 33], 96)
    expected = run(load(path, compiled=False), prompts, params).outputs
    model = compiled(path)
    assert run(model, prompts, params).outputs == expected
    assert run(model, prompts, params, method="mtp", k=3).outputs == expected


@pytest.mark.parametrize("step", [1, 7])
def test_bits_of_rows_do_not_depend_on_their_batch_in_bf16(tmp_path: Path, step: int) -> None:
    model = compiled(write_checkpoint(tmp_path, GLM4_MOE), "bfloat16")
    (tokens,) = prompts_of([40], 96)
    walk = Walk(model)
    parts = [walk.feed(tokens[start : start + step])[0] for start in range(0, 40, step)]
    assert torch.equal(torch.cat(parts), Walk(model).feed(tokens)[0])


def test_weights_rounded_to_bf16(tmp_path: Path) -> None:
    """Logits near those of the stored weights, and as far off as rounding makes them."""
    path = write_checkpoint(tmp_path, GLM4_MOE)
    (tokens,) = prompts_of([40], 96)
    exact, rounded = (
        Walk(compiled(path, dtype)).feed(tokens)[0] for dtype in ("float32", "bfloat16")
    )
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05
    assert torch.equal(Walk(compiled(path, "bfloat16")).feed(tokens)[0], rounded)
