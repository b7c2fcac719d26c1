"""The table of docs/tools.md is what make test-tools recorded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mtp_checkpoints.quantization.tools import LOSSES
from mtp_export.verify.evidence.statistics import Estimate
from pages import ROOT, rows_of

PAGE = (ROOT / "docs/tools.md").read_text()
FACTS: dict[str, Any] = json.loads((ROOT / "benchmarks/results/tools.json").read_text())
FAMILIES = {"glm4_moe": "GLM-4.5", "deepseek_v3": "DeepSeek-V3"}
MESSAGE_CHARACTERS = 110
INT4_WORDS = "I32"  # codes and zero points of every linear
LISTS = ("llm-compressor", "tools")


def cells(run: dict[str, Any]) -> list[str]:
    """Return the row of a run."""
    tool = f"{run['tool']} {run['version']}"
    started = [tool, f"`{run['scheme']}`", FAMILIES[run["family"]]]
    if "layer" not in run:
        return [*started, f"exit {run['code']}: `{shortened(run['message'])}`", "", "", ""]
    verdict = run["verify"]
    items = "; ".join(f"{words(name)}: {found}" for name, found in verdict["failed"].items())
    written = share(run["run"]) if "run" in run else ""
    graft = run.get("graft")
    after = "" if graft is None else share(graft["verify"]) if "verify" in graft else refused(graft)
    said = f"exit {verdict['code']}" + (items and f": {items}")
    return [*started, layer(run["layer"]), said, written, after]


def layer(facts: dict[str, Any]) -> str:
    tensors, original = facts["tensors"], sum(facts["of"].values())
    if not tensors:
        return f"lost: 0 of {original} tensors, {facts['announced']} layer announced"
    if tensors == facts["of"]:
        return f"kept: {original} of {original} tensors, unquantized"
    return f"kept: {tensors[INT4_WORDS] // 2} linears in int4, in {len(facts['files'])} file(s)"


def share(verified: dict[str, Any]) -> str:
    return Estimate(**verified["acceptance"]).shown()


def refused(graft: dict[str, Any]) -> str:
    """Return why there is no bundle, in the words that graft found in config.json."""
    found = re.search(r"Found ([^.]+)\.", graft["message"])
    assert found is not None, graft
    return f"refused, exit {graft['code']}: {found[1]}"


def words(item: str) -> str:
    return item.partition(": ")[2]


def shortened(message: str) -> str:
    if len(message) <= MESSAGE_CHARACTERS:
        return message
    return f"{message[:MESSAGE_CHARACTERS].rpartition(' ')[0]} …"


def test_the_table() -> None:
    expected = [cells(run) for run in FACTS["runs"].values()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert [row for row in rows_of(PAGE) if len(row) == 7] == expected, f"it should be\n{table}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_acceptance_of_the_originals(family: str) -> None:
    shown = Estimate(**FACTS["originals"][family]).shown()
    assert f"{FAMILIES[family]} {shown}" in PAGE.replace("\n", " ")


def test_the_warning_is_the_one_that_the_tool_prints() -> None:
    runs = [run for run in FACTS["runs"].values() if "layer" in run]
    by_tool = {run["tool"]: set(run["warnings"]) for run in runs}
    (warning,) = by_tool.pop("llm-compressor")
    assert f"`{warning}`" in PAGE
    assert not any(by_tool.values())


def test_the_versions_are_the_pinned_ones() -> None:
    pinned = "".join((ROOT / f"constraints-{name}.txt").read_text() for name in LISTS).lower()
    names = {"ModelOpt": "nvidia-modelopt", "AutoRound": "auto-round", "Quark": "amd-quark"}
    for run in FACTS["runs"].values():
        name = names.get(run["tool"], run["tool"].replace("llm-c", "llmc").lower())
        assert f"\n{name}=={run['version']}\n" in pinned


def test_a_verdict_says_which_tools_lose_the_layer() -> None:
    """All that lost it wherever they ran to their end, and no other."""
    lost: dict[str, set[bool]] = {}
    for run in FACTS["runs"].values():
        if "layer" in run:
            lost.setdefault(run["tool"], set()).add(not run["layer"]["tensors"])
    assert {tool for tool, each in lost.items() if each == {True}} == LOSSES.keys()
    shown = {run["tool"]: run["version"] for run in FACTS["runs"].values() if run["tool"] in LOSSES}
    assert all(version.startswith(LOSSES[tool].shown) for tool, version in shown.items())
