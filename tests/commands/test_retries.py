"""Requests that are made again, as people see them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from cases import Outcome, run_program
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources import transfers
from mtp_checkpoints.sources.transfers import AttemptFailed, patiently
from mtp_export.commands.runtime import Runtime
from object_server import ObjectServer
from remote_bundles import shrink_transfers

TOLD = "huggingface.co: name not known; attempt 2 of 2 in 0.0 s"
REFUSAL = "mtp-export: error: No answer."


def unanswered(*arguments: object, **options: object) -> None:
    """A request to a server whose name nobody knows."""
    failed = AttemptFailed(
        IoError("No answer"),
        server="huggingface.co",
        cause="name not known",
        is_unknown_name=True,
    )

    def attempt() -> None:
        raise failed

    patiently(attempt)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands whose first request fails at once."""
    monkeypatch.setattr(transfers, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr("mtp_export.commands.inspect.inspect_checkpoint", unanswered)
    monkeypatch.setattr("mtp_export.commands.inspect.parts_of_bundle", lambda place: {})
    monkeypatch.setattr(Runtime, "load", unanswered)
    monkeypatch.setattr("mtp_export.commands.generate.require_model", lambda folder: None)


def seen(outcome: Outcome) -> list[str]:
    assert outcome.code == 6
    return outcome.err.splitlines()


def test_a_further_attempt_is_told_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(run_program("inspect", "hf://a/b")) == [TOLD, REFUSAL]
    for quiet in ("--quiet", "-q"):
        assert seen(run_program("inspect", "hf://a/b", quiet)) == [REFUSAL]
    monkeypatch.setenv("MTP_EXPORT_QUIET", "1")
    assert seen(run_program("inspect", "hf://a/b")) == [REFUSAL]
    assert not logging.getLogger(transfers.__name__).handlers


@pytest.mark.parametrize("arguments", [("--prompt", "-q"), ("--", "-q"), ("--prompt", "--quiet")])
def test_a_value_that_equals_an_option_silences_nothing(arguments: tuple[str, ...]) -> None:
    assert seen(run_program("generate", *arguments[:-2], "bundle", *arguments[-2:])) == [
        TOLD,
        REFUSAL,
    ]


def test_readers_that_fail_together_are_told_of_once(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them reads again, and the bundle is whole."""
    pytest.importorskip("obstore", reason="the extra cloud is not installed")
    shrink_transfers(monkeypatch)
    server = ObjectServer()
    server.fill("weights", "tiny", pristine)
    for name, value in server.environment("s3").items():
        monkeypatch.setenv(name, value)
    with server.running():
        server.plant("cut", 12, after=8)
        words = ("--input-dir", "s3://weights/tiny", "--output-dir", tmp_path / "out")
        outcome = run_program(*words)
        assert not server.meets("cut"), "all twelve were met"
    assert outcome.code == 0, outcome.err
    told = re.findall(r"^s3://weights: .*; (attempt \d) of 6 in [\d.]+ s$", outcome.err, re.M)
    assert told and sorted(set(told)) == sorted(told)
