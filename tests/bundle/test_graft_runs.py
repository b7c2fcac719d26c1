"""Grafts of trained models through `verify --level run`: its verdict and the acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases import nightly_but, run_program
from mtp_checkpoints.tensors.model_identity import recorded_main_identity
from quantized_by_others import write

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MAINS = (
    ("glm4-moe-tiny", "gptq"),
    *(("glm4-moe-tiny", name) for name in ("awq", "compressed-tensors, fp8", "modelopt nvfp4")),
    *(
        ("deepseek-v3-tiny", name)
        for name in ("awq", "gptq", "gptq, asymmetric", "compressed-tensors, int4", "fp8")
    ),
)


@pytest.mark.usefixtures("without_training")
@pytest.mark.parametrize(("fixture", "name"), nightly_but(MAINS[:1], MAINS))
def test_verified_by_running(fixture: str, name: str, tmp_path: Path) -> None:
    """All checks pass, and more than half of the first drafts are accepted; the golden file that
    follows counts as many, of the main model that the grafted draft records."""
    original, output = FIXTURES / fixture, tmp_path / "output"
    write(original, tmp_path / "main", name)
    folders = ("--main", tmp_path / "main", "--mtp", original, "--output-dir", output)
    assert run_program("graft", *folders, "--quiet").code == 0
    is_quick = (fixture, name) == MAINS[0]
    size = ("--max-new-tokens", 16, "--k", 1) if is_quick else ("--max-new-tokens", 32)
    golden = ("--golden", tmp_path / "golden.jsonl")
    outcome = run_program("verify", output, "--level", "run", *size, *golden, "--json", "--quiet")
    assert outcome.code == 0, outcome.out
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    items: dict[str, Any] = {item["name"]: item for item in checks["acceptance"]["items"]}
    first = items["k=1, draft 1"]["data"]["conditional"]
    assert first["value"] > 0.5 and first["count"] > 20
    assert items["sanity band of draft 1"]["status"] == "pass"
    header = json.loads((tmp_path / "golden.jsonl").read_text().splitlines()[0])
    assert header["acceptance"]["1"] == [items["k=1, draft 1"]["data"]["cumulative"]]
    assert header["model"]["identity"]["main"] == recorded_main_identity(output / "mtp")
