"""Fate of the MTP layer in the hands of tools that quantize checkpoints, and its repair by a graft.

Every run is compared with benchmarks/results/tools.json, from which docs/tools.md is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_runs import RUNS, TOOLS, Run, facts_of, run_tool

CLOSE = 0.05  # Acceptance on another processor: near ties fall differently.
LOST = 0.15  # What quantizing the main model alone may cost: another text is drafted.


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layer_and_graft(
    run: Run,
    original: Callable[[str], Path],
    acceptance: Callable[[str], dict[str, Any]],
    calibration: Path,
    recorded: dict[str, Any],
    figures: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The facts of a run are the recorded ones; after the graft every check passes and about as
    many drafts are accepted as the original's."""
    source = original(run.family)
    written = run_tool(run, source, calibration, tmp_path / "output")
    facts = facts_of(written, source, tmp_path / "bundle")
    facts = figures[str(run)] = vars(run) | {"version": TOOLS[run.tool].version()} | facts
    if after := facts.get("graft", {}).get("verify"):
        assert after["failed"] == {} and after["code"] == 0
        assert after["acceptance"]["value"] > acceptance(run.family)["value"] - LOST
    known = recorded["runs"][str(run)]
    for share, before in zip(shares_of(facts), shares_of(known), strict=True):
        assert share == pytest.approx(before, abs=CLOSE)
    assert without_shares(facts) == without_shares(known)


def shares_of(facts: Any) -> list[float]:
    """Return the accepted shares in facts, in order."""
    if not isinstance(facts, dict):
        return []
    own = [facts["acceptance"]["value"]] if "acceptance" in facts else []
    return own + [share for value in facts.values() for share in shares_of(value)]


def without_shares(facts: Any) -> Any:
    if not isinstance(facts, dict):
        return facts
    return {key: without_shares(value) for key, value in facts.items() if key != "acceptance"}
