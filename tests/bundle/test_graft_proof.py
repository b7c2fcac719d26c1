"""Grafts that are proven by acceptance: the right layer, another training's, and none asked for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cases import Outcome, export, read_json, run_program
from mtp_export.verify import CHECKS
from mtp_export.verify.evidence.prompts import BUILT_IN
from mtp_runtime.models import memory_plan
from quantized_by_others import write
from verify.foreign_damages import another_training
from verify.foreign_sources import GLM, released

ALONE = "Pairing by shapes and copies alone, not proven by acceptance: "


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained miniature in int4, without its MTP layer."""
    folder = tmp_path_factory.mktemp("main") / "main"
    write(GLM, folder, "gptq")
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in BUILT_IN[:2]))
    return path


def graft(main: Path, mtp: Path, output: Path, *options: object) -> Outcome:
    return run_program("graft", "--main", main, "--mtp", mtp, "--output-dir", output, *options)


def finished_graft(main: Path, mtp: Path, output: Path, *options: object) -> Outcome:
    """The end of a graft in two shares."""
    for share in ("1/2", "2/2"):
        outcome = graft(main, mtp, output, "--share", share, "--quiet")
        assert outcome.code == 0, outcome.err
    return run_program("finish", output, *options)


def pairing_of(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome.out)["pairing"]
    return found


def test_the_original_layer_is_proven(
    main: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the figures of verify's own check, on the terminal and in the report."""
    output, report = tmp_path / "output", tmp_path / "report.json"
    options = ("--prove", "--prompts", prompts, "--report", report)
    outcome = graft(main, GLM, output, *options)
    assert outcome.code == 0, outcome.err
    pairing = read_json(report)["pairing"]
    assert pairing["status"] == "pass"
    said = " ".join(outcome.out.split())
    assert pairing["words"] in said and "Pairing proven by acceptance: draft 1 0." in said
    items = {item["name"]: item for item in pairing["items"]}
    first = items["k=1, draft 1"]["data"]["conditional"]
    assert first["value"] > 0.5 and first["count"] > 20
    assert "Prove it: " not in outcome.out and "prove" not in read_json(report)["next"]
    monkeypatch.setattr("mtp_export.verify.CHECKS", {"acceptance": CHECKS["acceptance"]})
    again = run_program("verify", output, "--prompts", prompts, "--json", "--quiet")
    checks = {check["name"]: check["items"] for check in json.loads(again.out)["checks"]}
    assert checks["acceptance"] == pairing["items"]


def test_the_layer_of_another_training(main: Path, prompts: Path, tmp_path: Path) -> None:
    """Of the same shapes and copies: the bundle is written, and the command ends with exit 7."""
    other = released(GLM)
    another_training(other)
    other.save(tmp_path / "other")
    options = ("--prove", "--prompts", prompts, "--json")
    outcome = graft(main, tmp_path / "other", tmp_path / "output", *options)
    assert outcome.code == 7
    assert pairing_of(outcome)["status"] == "fail"
    assert pairing_of(outcome)["words"].startswith("Pairing disproved by acceptance: draft 1 0.")
    assert "sanity band of draft 1" in outcome.err and "this main model's" in outcome.err
    assert (tmp_path / "output/mtp_export.json").is_file()


def test_shares_of_the_original_layer(main: Path, prompts: Path, tmp_path: Path) -> None:
    """Proven at their end, as by one run."""
    options, report = ("--prove", "--prompts", prompts), tmp_path / "report.json"
    outcome = finished_graft(main, GLM, tmp_path / "shared", *options, "--report", report)
    assert outcome.code == 0, outcome.err
    pairing = read_json(report)["pairing"]
    assert pairing["status"] == "pass" and pairing["words"] in " ".join(outcome.out.split())
    whole = graft(main, GLM, tmp_path / "whole", *options, "--json", "--quiet")
    assert pairing == pairing_of(whole)


def test_shares_of_another_trainings_layer(main: Path, prompts: Path, tmp_path: Path) -> None:
    other = released(GLM)
    another_training(other)
    other.save(tmp_path / "other")
    options = ("--prove", "--prompts", prompts, "--json")
    outcome = finished_graft(main, tmp_path / "other", tmp_path / "output", *options)
    assert outcome.code == 7 and "this main model's" in outcome.err
    assert pairing_of(outcome)["status"] == "fail"
    assert (tmp_path / "output/mtp_export.json").is_file()


def test_shares_are_not_run_unless_asked_for(main: Path, tmp_path: Path) -> None:
    outcome = finished_graft(main, GLM, tmp_path / "output", "--json")
    assert pairing_of(outcome)["words"] == f"{ALONE}verify at level run measures it."


def test_shares_of_no_graft_have_no_pairing(tmp_path: Path) -> None:
    """Refused before anything is written, and finished without."""
    output = tmp_path / "output"
    assert export(GLM, output, "--share", "1/1", "--quiet").code == 0
    outcome = run_program("finish", output, "--prove")
    assert outcome.code == 2 and "shares of mtp-export export" in outcome.err
    assert not (output / "mtp_export.json").exists()
    outcome = run_program("finish", output, "--json")
    assert outcome.code == 0 and "pairing" not in json.loads(outcome.out)


def test_prompts_at_the_end_of_shares_are_of_a_proof(tmp_path: Path) -> None:
    outcome = run_program("finish", tmp_path, "--prompts", "p.jsonl")
    assert outcome.code == 2 and "--prompts with --prove" in outcome.err


def test_nothing_is_run_unless_asked_for(main: Path, tmp_path: Path) -> None:
    outcome = graft(main, GLM, tmp_path / "output", "--json")
    assert pairing_of(outcome) == {
        "status": "not tested",
        "words": f"{ALONE}verify at level run measures it.",
        "items": [],
    }


def test_the_command_that_is_printed_proves_it(
    main: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = graft(main, GLM, tmp_path / "a graft")
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("Prove it:  "))
    program, *words = shlex.split(line.removeprefix("Prove it:  "))
    assert program == "mtp-export"
    monkeypatch.setattr("mtp_export.verify.CHECKS", {"acceptance": CHECKS["acceptance"]})
    again = run_program(*words, "--prompts", prompts, "--json", "--quiet")
    (check,) = json.loads(again.out)["checks"]
    assert (again.code, check["name"], check["status"]) == (0, "acceptance", "pass")


def test_a_model_that_does_not_fit_is_not_proven(
    main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "free_memory", lambda: {"available memory": 1})
    outcome = graft(main, GLM, tmp_path / "output", "--prove", "--json")
    assert outcome.code == 0
    assert pairing_of(outcome)["status"] == "not tested"
    assert pairing_of(outcome)["words"].startswith(f"{ALONE}the weights take ")
    assert ": use verify --stream, or --max-memory " in pairing_of(outcome)["words"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompts", "p.jsonl"), "--prompts with --prove"),
        (("--prove", "--dry-run"), "--prove with --dry-run"),
        (("--prove", "--share", "1/2"), "--prove with --share"),
    ],
)
def test_options_that_prove_nothing(
    options: tuple[str, ...], words: str, main: Path, tmp_path: Path
) -> None:
    outcome = graft(main, GLM, tmp_path / "output", *options)
    assert outcome.code == 2 and words in outcome.err
    assert not (tmp_path / "output").exists()
