"""Figures of vLLM in docs/ are those of the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_export.verify.evidence.statistics import Estimate

ROOT = Path(__file__).resolve().parents[1]
WORDS = {0: "none", 1: "one", 2: "two", 3: "three"}


def results(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / name).read_text())
    return loaded


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    return results("engines.json")


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/engines.md").read_text()


def runs_without_fault(engines: dict[str, Any]) -> dict[str, Any]:
    """Return the measured runs into which no fault was planted."""
    return {
        name: run
        for name, run in engines["measured"].items()
        if "vllm" in run and "vllm_change" not in run
    }


def test_the_table_of_acceptance(engines: dict[str, Any], page: str) -> None:
    rows = []
    amx = results("engines_amx.json")
    assert amx["hardware"]["commit"][:12] in page
    for name, run in (runs_without_fault(engines) | amx["measured"]).items():
        theirs = ", ".join(f"{share:.3f}" for share in run["vllm"])
        ours = ", ".join(Estimate(**share).shown() for share in run["ours"])
        rows += [f"| {name} | {theirs} | {ours} |"] if theirs else []
    assert len(rows) == 6
    for row in rows:
        assert row in page


def test_the_table_of_golden_files(page: str) -> None:
    facts = results("engines_golden.json")
    titles = {
        "golden, float32": "in float32",
        "golden, bfloat16": "in bfloat16",
        "golden, concatenation reversed": "in float32, halves of `eh_proj` exchanged",
    }
    size = f"{facts['prompts']} prompts x {facts['output_tokens']} tokens"
    assert f"{size}, 3 drafts per step, commit {facts['hardware']['commit'][:12]}" in page
    assert set(facts["measured"]) == set(titles)
    for name, run in facts["measured"].items():
        margin = f" {max(run['margins']):.2f}" if run["margins"] else ""
        theirs = ", ".join(f"{share:.3f}" for share in run["accepted"])
        golden = ", ".join(f"{share['value']:.3f}" for share in run["golden"])
        differ = f"{len(run['margins'])} of {facts['prompts']}"
        assert f"| {titles[name]} | {differ} |{margin} | {theirs} | {golden} |" in page


def test_the_table_of_other_families(page: str) -> None:
    facts = results("engines_families.json")
    runs = facts["measured"]
    assert facts["hardware"]["commit"][:12] in page
    for name, run in runs.items():
        theirs = ", ".join(f"{share:.3f}" for share in run["vllm"])
        ours = ", ".join(Estimate(**share).shown() for share in run["ours"])
        assert not theirs or f"| {name} | {theirs} | {ours} |" in page
    differ = [run["tokens_that_differ"] for run in runs.values()]
    largest = max(run["largest_difference"] for run in runs.values())
    words = f"of which {min(differ)} to {max(differ)} differ by at most {largest:.2f}"
    assert words in page.replace("\n", " ")
    first, second = runs["glm4_moe, 2"]["vllm"]
    assert f"vLLM accepts {second / first:.2f} of" in page


def test_the_run_of_gated_delta_nets(page: str) -> None:
    facts = results("engines_gated_delta.json")
    (run,) = facts["measured"].values()
    differ = f"of {run['tokens']:,} tokens {run['tokens_that_differ']} differ"
    words = (
        f"{differ}, by at most {run['largest_difference']:.2f} ({facts['hardware']['capability']}"
    )
    assert f"{words}, commit {facts['hardware']['commit'][:12]})" in page.replace("\n", " ")


def test_how_many_tokens_differ(engines: dict[str, Any], page: str) -> None:
    differ = [run["tokens_that_differ"] for run in runs_without_fault(engines).values()]
    (tokens,) = {run["tokens"] for run in runs_without_fault(engines).values()}
    assert f"{engines['prompts']} prompts x {engines['output_tokens']} tokens" in page
    assert f"of {tokens:,} tokens {min(differ)} to {max(differ)} differ" in page
    one = runs_without_fault(engines)["1"]
    theirs = f"{round(one['vllm'][0] * one['blocks'])} of {one['blocks']}"
    ours = (
        f"{round(one['ours'][0]['value'] * one['ours'][0]['count'])} of {one['ours'][0]['count']}"
    )
    assert f"{theirs}\nblocks in vLLM, {ours} in ours" in page
    assert engines["hardware"]["commit"][:12] in page
    assert f"vLLM {engines['vllm']}".partition("+")[0] in page


def test_what_is_left_of_acceptance_when_the_concatenation_is_reversed(
    engines: dict[str, Any], page: str
) -> None:
    run = engines["measured"]["1, concatenation reversed"]
    change = run["verify_change"]
    lost = [f"{-100 * change[key]:.1f}" for key in ("value", "high", "low")]
    assert f"measured {Estimate(**run['verify']).shown()}\naccepted" in page
    assert f"a loss of {lost[0]} [{lost[1]}, {lost[2]}] points" in page
    assert f"vLLM {run['vllm'][0]:.3f} and {-100 * run['vllm_change']:.1f} points" in page


@pytest.mark.parametrize("unit", ["amx", "float32"])
def test_the_table_of_speed_beside_vllm(unit: str) -> None:
    page, facts = (ROOT / "docs/benchmarks.md").read_text(), results(f"decode_vllm_{unit}.json")
    for row in facts["against_vllm"]:
        cells = [f"{row['batch']}, {WORDS[row['drafts']]}"]
        for engine in ("runtime", "vllm"):
            runs = row["runs"][engine]
            cells.append(f"{row[f'{engine}_seconds']:.2f} s ({min(runs):.2f}–{max(runs):.2f})")
        cells.append(f"{row['runtime_float32_seconds']:.2f} s")
        assert f"| {' | '.join(cells)} |" in page
    assert f"--output-tokens {facts['output_tokens']}`" in page
    assert f"commit {facts['hardware']['commit'][:12]}" in page
