"""The runtime in bf16: near its fp32 self, and able to decode with and without drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
def engines(trained: Path) -> dict[str, LLM]:
    return {
        dtype: LLM(trained, dtype=dtype, speculate_method="mtp", speculate_max_draft_token_num=2)
        for dtype in ("float32", "bfloat16")
    }


@torch.inference_mode()
def logits_of(model: Model, tokens: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    pages = PageAllocator(8, 16)
    cache = model.new_cache(pages)
    pages.poison_freed(cache)
    sequence = CachedSequence()
    pages.append(sequence, len(tokens))
    layout = lay_out(pages, [sequence], [(0, len(tokens))], model.device)
    after = model(torch.tensor(tokens), cache, layout).after
    assert after.dtype is dtype
    return model.head.logits(after)


def test_logits_are_near_those_of_float32(engines: dict[str, LLM], prompts: list[str]) -> None:
    """The 61 layers round at 2^-9 each time: a few per cent of noise, few changed choices."""
    agreeing = total = 0
    for prompt in prompts:
        tokens = engines["float32"].tokenizer.encode(prompt)[:100]
        exact = logits_of(engines["float32"].engine.model, tokens, torch.float32)
        rounded = logits_of(engines["bfloat16"].engine.model, tokens, torch.bfloat16)
        assert rounded.dtype is torch.float32
        error = (rounded - exact).norm() / exact.norm()
        assert error < 0.04
        agreeing += int((rounded.argmax(1) == exact.argmax(1)).sum())
        total += len(tokens)
    assert agreeing >= 0.9 * total


def acceptance(outputs: list[RequestOutput]) -> float:
    accepted = sum(output.metrics.accepted[0] for output in outputs)
    return accepted / sum(output.metrics.reached[0] for output in outputs)


def test_speculation_decodes_as_without(
    engines: dict[str, LLM], trained: Path, prompts: list[str]
) -> None:
    plain = LLM(trained, dtype="bfloat16").generate(prompts, PARAMS)
    found = engines["bfloat16"].generate(prompts, PARAMS)
    assert all(len(output.token_ids) == PARAMS.max_tokens for output in found)
    same = sum(p.token_ids == f.token_ids for p, f in zip(plain, found, strict=True))
    assert same >= len(prompts) - 1, "a group's rows differ in more than a tie"
    assert abs(acceptance(found) - acceptance(engines["float32"].generate(prompts, PARAMS))) < 0.2
