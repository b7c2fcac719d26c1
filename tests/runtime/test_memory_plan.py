"""Memory that a model takes, planned by headers and held once it is loaded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.load_plan import held_bytes
from cases import run_program
from mtp_checkpoints.errors import ResourceError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_runtime import LLM
from mtp_runtime.config import EngineConfig
from mtp_runtime.memory import bytes_per_page
from mtp_runtime.models import memory_plan
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from mtp_runtime.models.memory_plan import WORKING_BYTES, MemoryPlan

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
V3 = FIXTURES / "deepseek-v3-tiny"
# Of rotations and other tables, which WORKING_BYTES has room for.
TABLES = 64 << 20
GB = 10**9


def plan_of(folder: Path, options: LoadOptions) -> MemoryPlan:
    return open_model(folder, options, packs=options.compiled).memory_plan(options)


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": size})


@pytest.mark.parametrize("with_mtp", [True, False])
@pytest.mark.parametrize("folder", [V3, FIXTURES / "glm4-moe-tiny"], ids=lambda path: path.name)
def test_a_plan_is_what_is_held(folder: Path, with_mtp: bool) -> None:
    held, plans = {}, {}
    for dtype in ("float32", "bfloat16"):
        options = LoadOptions(dtype=dtype, with_mtp=with_mtp)
        plans[dtype] = plan = plan_of(folder, options)
        model = load_model(folder, options).model
        held[dtype] = held_bytes([model])
        assert plan.weight_bytes <= held[dtype] <= plan.weight_bytes + TABLES
        assert plan.token_bytes == bytes_per_page((model,), 1)
    assert plans["float32"].in_dtype(torch.bfloat16) == plans["bfloat16"]


def test_matrices_stay_as_they_are_stored_but_for_those_that_are_absorbed() -> None:
    plan = plan_of(V3, LoadOptions())
    files = [*V3.glob("*.safetensors")]
    tensors = Checkpoint.open(V3).tensors
    absorbed = [one for name, one in tensors.items() if name.endswith("kv_b_proj.weight")]
    assert plan.dense_bytes == 4 * sum(math.prod(one.shape) for one in absorbed) > 0
    others = sum(path.stat().st_size for path in files) - sum(one.size_bytes for one in absorbed)
    assert plan.weight_bytes - plan.dense_bytes < 1.1 * others
    assert plan_of(FIXTURES / "glm4-moe-tiny", LoadOptions()).dense_bytes == 0


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(V3, LoadOptions(with_mtp=False))
    needed = plan.needed_bytes(1024)
    assert needed == plan.weight_bytes + 1024 * plan.token_bytes + WORKING_BYTES
    with_free(monkeypatch, needed)
    assert LLM(V3, cache_tokens=1024, speculate_method="none").generate([[5]])
    with_free(monkeypatch, needed - 1)
    monkeypatch.setattr("mtp_runtime.models.load.OpenedModel.model", lambda *_: pytest.fail())
    with pytest.raises(ResourceError, match="The model does not fit into memory"):
        LLM(V3, cache_tokens=1024, speculate_method="none")


def test_the_refusal_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MemoryPlan(20 * GB, 18 * GB, 10**6, torch.float32)
    for free, words in (
        (16 * GB, "--dtype bfloat16 takes 13.1 GB"),
        (12 * GB, "Use a machine with more memory"),
    ):
        with_free(monkeypatch, free)
        with pytest.raises(ResourceError) as refusal:
            plan.check(V3, 1000)
        assert words in str(refusal.value.todo)
    small = plan.in_dtype(torch.bfloat16)
    assert small.weight_bytes == 11 * GB
    with_free(monkeypatch, 13 * GB)
    with pytest.raises(ResourceError) as refusal:
        small.check(V3, 10_000)
    assert f"A cache of {(2 * GB - WORKING_BYTES) // 10**6:,} tokens fits" in str(
        refusal.value.todo
    )


def test_generate_says_so_in_one_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1)
    outcome = run_program("generate", V3, "--prompt", "a")
    assert outcome.code == 5 and outcome.err.count("\n") == 1
    assert "1.1 GB: weights 0.1 GB, of which 0.0 GB become float32, and 1.1 GB" in outcome.err
    assert "Found available memory of 0.0 GB" in outcome.err


def test_a_usual_cache_takes_no_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(V3, LoadOptions(with_mtp=False))
    monkeypatch.setattr("mtp_runtime.memory.free_memory", lambda: {"x": 1000 * plan.token_bytes})
    llm = LLM(V3, speculate_method="none")
    assert llm.engine.config.cache_tokens == 900 // 64 * 64
    assert caplog.messages == ["The cache has room for 896 tokens, not for 32768: memory is full"]
    monkeypatch.setattr("mtp_runtime.memory.free_memory", lambda: {"x": 1 << 50})
    assert LLM(V3, loaded=llm._loaded).engine.config.cache_tokens == EngineConfig.cache_tokens
    assert LLM(V3, loaded=llm._loaded, cache_tokens=64).engine.config.cache_tokens == 64
    monkeypatch.setattr("mtp_runtime.memory.free_memory", dict)
    assert LLM(V3, loaded=llm._loaded).engine.config.cache_tokens == EngineConfig.cache_tokens


def test_a_limit_that_is_unknown_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", dict)
    MemoryPlan(1 << 60, 0, 1, torch.float32).check(V3, 1)
