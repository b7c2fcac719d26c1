"""Dry runs of the commands that decode: what they print is what loading would decide by, and they
load nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cases import run_program
from mtp_export.commands.memory_plan import memory_facts
from mtp_runtime import LLM, LLMOptions
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.draft_cost import DraftCost
from mtp_runtime.models.load import LoadOptions, open_model
from mtp_runtime.models.memory_plan import WORKING_BYTES, MemoryPlan
from mtp_runtime.run_plan import RunMemory, planned_memory
from runtime.drafts import write_eagle3

V3 = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
PLAN = open_model(V3, LoadOptions(), packs=True).memory_plan(LoadOptions())
COMMANDS = pytest.mark.parametrize("command", ["generate", "serve", "verify"])


@pytest.fixture(autouse=True)
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is read, and no port opened."""
    for name in ("raw", "linear", "embedding", "head"):
        monkeypatch.setattr(WeightSource, name, lambda *_: pytest.fail("a weight is read"))
    monkeypatch.setattr("mtp_export.serve.address.Address.bound", lambda _: pytest.fail("a port"))


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in ("memory", "models.memory_plan", "run_plan"):
        monkeypatch.setattr(f"mtp_runtime.{module}.free_memory", lambda: {"available": size})


def facts_of(*arguments: object) -> dict[str, Any]:
    outcome = run_program("generate", V3, "--dry-run", "--json", *arguments)
    facts: dict[str, Any] = json.loads(outcome.out)
    assert facts["fits"] is (outcome.code == 0)
    return facts


@COMMANDS
def test_what_fits_is_shown_and_not_loaded(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 40)
    outcome = run_program(command, V3, "--dry-run")
    assert outcome.code == 0 and not outcome.err
    assert outcome.out.splitlines()[0] == f"Memory plan of {V3}"
    assert "31.7 MB │ as they are stored  " in outcome.out
    assert "32,768 tokens" in outcome.out
    assert outcome.out.splitlines()[-1] == "Fits: yes. Nothing was loaded."


@COMMANDS
def test_what_does_not_fit_ends_as_loading_it_would(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, WORKING_BYTES)
    planned = run_program(command, V3, "--dry-run")
    assert planned.code == 5
    assert planned.out.splitlines()[-1] == "Fits: no. Nothing was loaded."
    loaded = run_program("generate", V3, "--prompt", "a")
    assert loaded.code == 5 and planned.err == loaded.err


def test_the_facts_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 40)
    facts = facts_of()
    assert facts["weight_bytes"] == PLAN.weight_bytes and facts["dtype"] == "float32"
    assert facts["cache_bytes"] == 32768 * PLAN.token_bytes
    assert facts["needed_bytes"] == PLAN.needed_bytes(32768)
    assert (facts["limit"], facts["free_bytes"]) == ("available", 1 << 40)
    assert facts["dense_bytes"] == PLAN.dense_bytes
    halved = facts_of("--dtype", "bfloat16")
    assert halved["weight_bytes"] == PLAN.in_dtype(torch.bfloat16).weight_bytes
    assert facts_of("--speculate-method", "none")["weight_bytes"] < PLAN.weight_bytes


def test_what_drafts_cost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the most that a step may have; without them nothing is."""
    options = ("--speculate-max-draft-token-num", "3")
    drafts = facts_of(*options)["drafts"]
    assert PLAN.drafts is not None
    assert [one["k"] for one in drafts] == [1, 2, 3]
    assert [one["bytes_ratio"] for one in drafts] == [PLAN.drafts.step(k) for k in (1, 2, 3)]
    shown = " ".join(run_program("generate", V3, "--dry-run", *options).out.split())
    needed = drafts[-1]["needed_acceptance"]
    assert f"With 3 drafts a step touches up to {drafts[-1]['bytes_ratio']:.2f} times" in shown
    assert f"where over {needed:.0%} of drafts are accepted. Fits" in shown
    monkeypatch.setattr(DraftCost, "needed_acceptance", lambda *_: None)
    shown = " ".join(run_program("generate", V3, "--dry-run").out.split())
    assert "where over 100% of drafts are accepted. Use --speculate-method none." in shown
    assert "drafts" not in facts_of("--speculate-method", "none")


def test_a_usual_cache_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    free = PLAN.needed_bytes(0) + 1000 * PLAN.token_bytes
    with_free(monkeypatch, free)
    facts = facts_of()
    assert facts["cache_tokens"] == 900 // 64 * 64
    assert facts["needed_bytes"] <= free
    with_free(monkeypatch, PLAN.needed_bytes(0))
    assert not facts_of()["fits"]


def test_a_limit_bounds_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_runtime.run_plan.resident_bytes", lambda: 500)
    limit = 500 + PLAN.weight_bytes + 1000 * PLAN.token_bytes
    options = LLMOptions(max_memory_bytes=limit, speculate_method="auto")
    memory = planned_memory(V3, options)
    assert memory.cache_tokens == 900 // 64 * 64 and memory.needed_bytes <= limit
    assert memory.limits["--max-memory"] == limit
    outcome = run_program("serve", V3, "--dry-run", "--max-memory", "1MB")
    assert outcome.code == 5 and "Raise --max-memory" in outcome.err
    there_is = next(line for line in outcome.out.splitlines() if "there is" in line)
    assert "1.0 MB" in there_is and "--max-memory" in there_is


def test_a_second_model_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 40)
    alone = facts_of("--speculate-method", "none")
    both = facts_of("--speculate-method", "draft_model", "--draft-model", V3)
    for name in ("weight_bytes", "cache_bytes"):
        assert both[name] == 2 * alone[name]


def test_a_draft_of_its_own_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_free(monkeypatch, 1 << 40)
    write_eagle3(tmp_path, json.loads((V3 / "config.json").read_text()))
    elements = 0
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            elements += sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    alone = facts_of("--speculate-method", "none")
    drafted = facts_of("--speculate-method", "eagle3", "--draft-model", tmp_path)
    assert drafted["weight_bytes"] == alone["weight_bytes"] + 4 * elements > alone["weight_bytes"]


def test_given_tokens_of_cache_are_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, PLAN.needed_bytes(640))
    fitting = LLMOptions(cache_tokens=640, speculate_method="auto")
    assert planned_memory(V3, fitting).cache_tokens == 640
    larger = LLMOptions(cache_tokens=704, speculate_method="auto")
    refused = planned_memory(V3, larger)
    assert refused.refusal is not None and refused.cache_tokens == 704
    with pytest.raises(type(refused.refusal)) as refusal:
        LLM(V3, **vars(larger))
    assert str(refusal.value) == str(refused.refusal)


def test_memory_of_another_device_is_not_compared() -> None:
    plan = MemoryPlan(1 << 60, 0, 1, torch.bfloat16)
    facts = memory_facts(RunMemory(plan, 64, {}), "cuda")
    assert facts["fits"] is None and facts["free_bytes"] is None and facts["limit"] is None


@pytest.mark.parametrize("options", [("--level", "files"), ("--stream",), ("--mtp", V3)])
def test_a_dry_run_of_what_loads_no_model_is_refused(options: tuple[object, ...]) -> None:
    outcome = run_program("verify", V3, "--dry-run", *options)
    assert outcome.code == 2 and not outcome.out
    assert "A dry run plans the memory of" in outcome.err
