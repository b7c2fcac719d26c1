"""mtp-export compile: a package of a bundle's decode step, and what is no place for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import run_program
from runtime.checkpoints import GLM4_MOE, write_checkpoint
from runtime.conftest import FIXTURE

PROMPT = ["--prompt", "Once upon a time", "--max-new-tokens", "12", "--json"]


def test_places_that_take_no_package(tmp_path: Path) -> None:
    there = tmp_path / "step.pt2"
    there.write_bytes(b"something")
    for output, code, message in (
        (tmp_path / "step.so", 2, "Expected --output FILE.pt2"),
        (tmp_path / "none" / "step.pt2", 6, "no folder to write to"),
        (there, 8, "Add --overwrite"),
    ):
        outcome = run_program("compile", FIXTURE, "--output", output)
        assert (outcome.code, message in outcome.err) == (code, True), outcome.err
    assert there.read_bytes() == b"something"


def test_a_model_without_a_static_graph(tmp_path: Path) -> None:
    """It is refused before anything is compiled, and nothing stays behind."""
    bundle = write_checkpoint(tmp_path / "glm", GLM4_MOE)
    outcome = run_program("compile", bundle, "--output", tmp_path / "step.pt2")
    assert outcome.code == 4 and "cannot be a static graph (layer 0)" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["glm"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_by_a_package(tmp_path: Path, dtype: str) -> None:
    package = tmp_path / "step.pt2"
    options = ["--dtype", dtype]
    outcome = run_program("compile", FIXTURE, "--output", package, *options, "--json")
    assert outcome.code == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts["bytes"] == package.stat().st_size
    assert set(facts["milliseconds_per_step"]) == {"torch, eager", "package", "compiled kernels"}
    assert [path.name for path in tmp_path.iterdir()] == ["step.pt2"]
    found = run_program("generate", FIXTURE, "--compiled-step", package, *options, *PROMPT)
    assert found.code == 0, found.err
    if dtype == "float32":
        usual = run_program("generate", FIXTURE, *PROMPT)
        ids = [json.loads(one.out)["outputs"][0]["token_ids"] for one in (found, usual)]
        assert ids[0] == ids[1]
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    refused = run_program(
        "generate", FIXTURE, "--compiled-step", package, "--dtype", other, *PROMPT
    )
    assert refused.code == 4 and f"Found dtype {dtype}" in refused.err
