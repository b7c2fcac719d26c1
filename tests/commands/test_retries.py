"""Requests that are made again, as people see them."""

from __future__ import annotations

import logging

import pytest

from cases import run_program
from mtp_checkpoints.errors import IoError
from mtp_checkpoints.sources import transfers
from mtp_checkpoints.sources.transfers import AttemptFailed, patiently


def test_a_further_attempt_is_told_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "FIRST_WAIT_SECONDS", 0.0)

    def ask(arguments: list[str]) -> int:
        failed = AttemptFailed(
            IoError("No answer"), cause="huggingface.co: name not known", is_unknown_name=True
        )

        def attempt() -> int:
            raise failed

        return patiently(attempt)

    monkeypatch.setattr("mtp_export.commands.program._run", ask)
    outcome = run_program("inspect", "hf://a/b")
    assert outcome.code == 6 and outcome.err.splitlines() == [
        "huggingface.co: name not known; attempt 2 of 2 in 0.0 s",
        "mtp-export: error: No answer.",
    ]
    for quiet in ("--quiet", "-q"):
        outcome = run_program("inspect", "hf://a/b", quiet)
        assert (outcome.code, outcome.err) == (6, "mtp-export: error: No answer.\n")
    assert not logging.getLogger(transfers.__name__).handlers
