"""The runtime with weights in bf16: near its fp32 self, and exact with and without drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.common.dequantized import write_dequantized
from mtp_runtime import LLM, RequestOutput, SamplingParams
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.models.model import Model

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(trained: Path) -> list[str]:
    lines = (trained.parent / "prompts.jsonl").read_text().splitlines()
    texts = [str(json.loads(line)["prompt"]) for line in lines]
    return sorted(texts, key=len)[:2]


@pytest.fixture(scope="module")
def dense(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32: what is stored in fewer bits stays so in either dtype."""
    folder = tmp_path_factory.mktemp("dense")
    for tokenizer in trained.glob("tokenizer*"):
        shutil.copy(tokenizer, folder)
    return write_dequantized(trained, folder)


@pytest.fixture(scope="module")
def engines(dense: Path) -> dict[str, LLM]:
    return {
        dtype: LLM(dense, dtype=dtype, speculate_method="mtp", speculate_max_draft_token_num=2)
        for dtype in ("float32", "bfloat16")
    }


@torch.inference_mode()
def logits_of(model: Model, tokens: tuple[int, ...]) -> torch.Tensor:
    pages = PageAllocator(8, 16)
    cache = model.new_cache(pages)
    pages.poison_freed(cache)
    sequence = CachedSequence()
    pages.append(sequence, len(tokens))
    layout = lay_out(pages, [sequence], [(0, len(tokens))], model.device)
    after = model(torch.tensor(tokens), cache, layout).after
    assert after.dtype is torch.float32
    return model.head.logits(after)


def test_logits_are_near_those_of_float32(engines: dict[str, LLM], prompts: list[str]) -> None:
    """Weights rounded at 2^-9, activations not: a per cent of noise, few changed choices."""
    agreeing = total = 0
    for prompt in prompts:
        tokens = engines["float32"].tokenizer.encode(prompt)[:100]
        exact = logits_of(engines["float32"].engine.model, tokens)
        rounded = logits_of(engines["bfloat16"].engine.model, tokens)
        error = (rounded - exact).norm() / exact.norm()
        assert 0 < error < 0.02
        agreeing += int((rounded.argmax(1) == exact.argmax(1)).sum())
        total += len(tokens)
    assert agreeing >= 0.9 * total


def acceptance(outputs: list[RequestOutput]) -> float:
    accepted = sum(output.metrics.accepted[0] for output in outputs)
    return accepted / sum(output.metrics.reached[0] for output in outputs)


def test_speculation_decodes_as_without(
    engines: dict[str, LLM], dense: Path, prompts: list[str]
) -> None:
    plain = LLM(dense, dtype="bfloat16").generate(prompts, PARAMS)
    found = engines["bfloat16"].generate(prompts, PARAMS)
    assert all(len(output.token_ids) == PARAMS.max_tokens for output in found)
    assert [output.token_ids for output in plain] == [output.token_ids for output in found]
    assert abs(acceptance(found) - acceptance(engines["float32"].generate(prompts, PARAMS))) < 0.2
