"""verify --max-memory: a model whose routed experts do not all fit is run as any other, alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases import run_program
from mtp_runtime.models import memory_plan

GLM = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"
ONE_MODEL = "--max-memory has room for one model, of which experts are read from disk"


@pytest.fixture(autouse=True)
def nothing_else_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp_runtime.run_plan.resident_bytes", lambda: 0)
    monkeypatch.setattr("mtp_runtime.run_plan.READING_BYTES", 0)


def items_of(*options: object) -> dict[str, dict[str, Any]]:
    """Items of a verification at level run by their check and name."""
    words = ("verify", GLM, "--level", "run", "--max-new-tokens", "8", "--k", "1", "--json")
    outcome = run_program(*words, *options)
    assert outcome.code == 0, outcome.err
    checks = json.loads(outcome.out)["checks"]
    return {f"{check['name']}: {i['name']}": i for check in checks for i in check["items"]}


@pytest.mark.usefixtures("without_training")
def test_a_model_beyond_the_limit_passes_alone() -> None:
    items = items_of("--max-memory", "3MB", "--source", GLM)
    alone = [name for name, item in items.items() if item.get("cause") == ONE_MODEL]
    assert sorted(alone) == [
        "differential: all of it",
        "greedy: bf16, mtp, k=1",
        "paths: attention kernel or its reference",
    ]
    for name in (
        "greedy: mtp, k=5",
        "paths: prefill whole or in chunks of 7",
        "ledger: runtime loads it: every tensor explained",
    ):
        assert items[name]["status"] == "pass"


def test_too_small_a_limit_runs_nothing_and_says_what_would_do() -> None:
    items = items_of("--max-memory", "2MB")
    assert items["greedy: all of it"]["status"] == "not tested"
    assert "the model takes 3 MB at least" in items["greedy: all of it"]["cause"]


def test_a_model_that_does_not_fit_is_told_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 1000})
    assert "use verify --stream, or --max-memory" in items_of()["greedy: all of it"]["cause"]
