"""Drafts in a bundle's own folders are loaded, measured and compared; their faults are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from faults.draft_faults import DRAFT_FAULTS, DraftFault
from faults.fitted_drafts import write_fitted_eagle3, write_fitted_heads
from faults.matrix import no_progress
from mtp_export.verify import CHECKS, function_at
from mtp_export.verify.check import CheckResult, Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import acceptance, greedy, speed
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.report.charts import charts
from mtp_export.verify.report.report import Report
from mtp_export.verify.weights import load_report
from mtp_runtime.drafters import draft_folders
from mtp_runtime.sampling import SamplingParams

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures/deepseek-v3-tiny"
PAGE = (FIXTURE.parents[1] / "docs/faults.md").read_text()
METHODS = ["eagle3", "parallel_heads"]
Run = Callable[[Context], Iterator[Item]]
RUNS: dict[str, Run] = {
    "ledger": load_report.extra_drafts,
    "acceptance": acceptance.extra_drafts,
}


@pytest.fixture(scope="module")
def whole(trained_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A good bundle with both drafts."""
    bundle = Path(shutil.copytree(trained_bundle, tmp_path_factory.mktemp("drafts") / "bundle"))
    prompts = bundle.parent / "prompts.jsonl"
    lines = (FIXTURE.parent / "prompts.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines[::16][:10]))
    options = VerifyOptions(bundle, level=Level.RUN, prompts=prompts, max_new_tokens=12, ks=(2,))
    context = Context.open(options, no_progress)
    write_fitted_eagle3(bundle / "eagle3", context.corpus)
    write_fitted_heads(bundle / "parallel_heads", context.corpus)
    return context


@pytest.fixture(scope="module")
def good(whole: Context) -> dict[str, list[Item]]:
    return {check: list(run(whole)) for check, run in RUNS.items()}


def said(items: list[Item]) -> str:
    return " | ".join(f"{i.name}: {i.cause}" for i in items if i.status is Status.FAIL)


def test_the_functions_belong_to_checks() -> None:
    assert RUNS["ledger"] in map(function_at, CHECKS["ledger"].places)
    assert RUNS["acceptance"] in map(function_at, CHECKS["acceptance"].places)


def test_good_drafts_pass(whole: Context, good: dict[str, list[Item]]) -> None:
    assert [own.method for own in whole.extra_drafts] == METHODS
    for items in good.values():
        assert said(items) == ""
        assert {item.name.partition(",")[0].partition(":")[0] for item in items} == set(METHODS)
    measured = [item for item in good["acceptance"] if "conditional" in item.data]
    first = [item.data["conditional"]["value"] for item in measured if item.data["position"] == 1]
    assert len(first) == 2 and min(first) > 0.2, first


def test_a_bundle_without_drafts_says_nothing_of_them(trained_bundle: Path, tmp_path: Path) -> None:
    assert draft_folders(tmp_path) == {}
    context = Context.open(VerifyOptions(trained_bundle, level=Level.RUN), no_progress)
    assert not [item for run in RUNS.values() for item in run(context)]


def test_greedy_equality_and_speed_have_rows_per_method(whole: Context) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    trial = greedy.Trial(whole.corpus.model, greedy.mixed_prompts(whole.prompts)[:2], params)
    runs = dict(greedy._of_extra(trial, own) for own in whole.extra_drafts)
    for method in METHODS:
        run = runs[f"{method}, k={greedy.SOME_K}"]
        assert greedy._equal(trial, run, method).status is Status.PASS
        assert any(proposal.tokens for proposal in run.proposals)
    corpus = replace(whole.corpus, new_tokens=8)
    rows = [item for own in whole.extra_drafts for item in speed._of_extra(corpus, own, (2,))]
    assert {item.data["method"] for item in rows} == set(METHODS)
    assert all(item.data["measured"] > 0 for item in rows)


@pytest.mark.parametrize("fault", DRAFT_FAULTS, ids=lambda fault: fault.name)
def test_fault_is_named(fault: DraftFault, whole: Context, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(whole.options.bundle / fault.method, bundle / fault.method)
    fault.plant(bundle / fault.method)
    # The model and its texts are those of the good bundle.
    damaged = replace(whole, options=replace(whole.options, bundle=bundle), _drafts={})
    damaged.__dict__["corpus"] = whole.corpus
    assert fault.cause in said(list(RUNS[fault.caught_by](damaged)))
    row = f"| {fault.name} | `{fault.method}` | `{fault.caught_by}` | {fault.cause} |"
    assert row in PAGE, "docs/faults.md says otherwise"


def test_charts_name_the_method(whole: Context, good: dict[str, list[Item]]) -> None:
    result = CheckResult("acceptance", "Acceptance", tuple(good["acceptance"]), 0.0)
    facts = {"source_bytes": 0, "parts_bytes": {}}
    drawn = charts(Report(options=whole.options, facts=facts, results=(result,), seconds=0.0))
    assert any("eagle3, k=2, draft 1" in chart.svg for chart in drawn)
