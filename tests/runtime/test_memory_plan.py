"""Memory that a model takes, planned by headers and held once it is loaded."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.load_plan import held_bytes
from cases import nightly_but, run_program
from mtp_checkpoints.errors import ResourceError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_runtime import LLM
from mtp_runtime.config import EngineConfig
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.memory import bytes_per_page
from mtp_runtime.models import memory_plan
from mtp_runtime.models.load import LoadOptions, load_model, open_model
from mtp_runtime.models.memory_plan import WORKING_BYTES, MemoryPlan
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.harness import Walk

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
V3, GLM = FIXTURES / "deepseek-v3-tiny", FIXTURES / "glm4-moe-tiny"
# Of rotations and other tables, which WORKING_BYTES has room for.
TABLES = 64 << 20
ARENA = 32 << 20  # of packed matrices, at least
GB = 10**9


def plan_of(folder: Path, options: LoadOptions) -> MemoryPlan:
    return open_model(folder, options, packs=options.compiled).memory_plan(options)


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": size})


@pytest.mark.parametrize(
    ("folder", "with_mtp"),
    nightly_but([(V3, True), (GLM, False)], product([V3, GLM], [True, False])),
    ids=lambda value: getattr(value, "name", value),
)
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


def test_matrices_stay_as_they_are_stored() -> None:
    plan = plan_of(V3, LoadOptions())
    assert plan.dense_bytes == 0
    assert plan.weight_bytes < 1.1 * sum(path.stat().st_size for path in V3.glob("*.safetensors"))


def test_matrices_of_one_stack_in_several_forms_become_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a query's down projection is not packed as it is stored, the latent's is not either."""
    form = WeightSource.packed_form
    monkeypatch.setattr(
        WeightSource,
        "packed_form",
        lambda source, name, *columns: None if "q_a" in name else form(source, name, *columns),
    )
    options, tensors = LoadOptions(with_mtp=False), Checkpoint.open(V3).tensors
    plan = plan_of(V3, options)
    stacks = [
        one.shape
        for name, one in tensors.items()
        if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")) and ".61." not in name
    ]
    assert plan.dense_bytes == 4 * sum(map(math.prod, stacks))
    held = held_bytes([load_model(V3, options).model])
    assert plan.weight_bytes <= held <= plan.weight_bytes + TABLES


def test_layers_that_torch_runs_become_float32(tmp_path: Path) -> None:
    """Of sparse attention in contexts longer than what the indexer chooses, whole layers do."""
    path = write_checkpoint(tmp_path, SMALL_CONFIGS["deepseek_v32"])
    for file in path.glob("*.safetensors"):
        save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    options = LoadOptions(max_model_len=512)
    plan, model = plan_of(path, options), load_model(path, options).model
    Walk(model).feed([5, 6, 7])  # which expands them
    assert held_bytes([model]) <= plan.weight_bytes + ARENA
    assert plan.weight_bytes > 1.9 * plan_of(path, LoadOptions()).weight_bytes


def test_what_does_not_fit_is_refused_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(GLM, LoadOptions(with_mtp=False))
    needed = plan.needed_bytes(1024)
    assert needed == plan.weight_bytes + 1024 * plan.token_bytes + WORKING_BYTES
    with_free(monkeypatch, needed)
    assert LLM(GLM, cache_tokens=1024, speculate_method="none").generate([[5]])
    with_free(monkeypatch, needed - 1)
    monkeypatch.setattr("mtp_runtime.models.load.OpenedModel.model", lambda *_: pytest.fail())
    with pytest.raises(ResourceError, match="The model does not fit into memory"):
        LLM(GLM, cache_tokens=1024, speculate_method="none")


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
    assert "1.1 GB: weights 0.0 GB, and 1.1 GB" in outcome.err
    assert "Found available memory of 0.0 GB" in outcome.err


def test_a_usual_cache_takes_no_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(GLM, LoadOptions(with_mtp=False))
    monkeypatch.setattr("mtp_runtime.memory.free_memory", lambda: {"x": 1000 * plan.token_bytes})
    llm = LLM(GLM, speculate_method="none")
    assert llm.engine.config.cache_tokens == 900 // 64 * 64
    assert caplog.messages == ["The cache has room for 896 tokens, not for 32768: memory is full"]
    monkeypatch.setattr("mtp_runtime.memory.free_memory", lambda: {"x": 1 << 50})
    assert LLM(GLM, loaded=llm._loaded).engine.config.cache_tokens == EngineConfig.cache_tokens
    assert LLM(GLM, loaded=llm._loaded, cache_tokens=64).engine.config.cache_tokens == 64
    monkeypatch.setattr("mtp_runtime.memory.free_memory", dict)
    assert LLM(GLM, loaded=llm._loaded).engine.config.cache_tokens == EngineConfig.cache_tokens


def test_a_limit_that_is_unknown_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", dict)
    MemoryPlan(1 << 60, 0, 1, torch.float32).check(V3, 1)
