"""Good bundles pass when they run: within the gates of their source, no other layout drafts better,
drafts depend on their inputs. Here the row that loses the most, on a little text;
`python -m faults.good_rows` runs every row on more."""

from __future__ import annotations

from pathlib import Path

from faults.good_rows import FIXTURE, Figures, Good, items_of
from faults.sweep import prompts_of
from mtp_export.verify.check import Status
from mtp_runtime.models.load import LoadOptions, load_model


def test_good_bundle_runs_as_its_source(tmp_path: Path) -> None:
    good = Good.written("int4 everywhere", tmp_path / "bundle")
    source = load_model(FIXTURE, LoadOptions()).model
    items = items_of(good, source=source, prompts=prompts_of(0, 8), tokens=12)
    assert Figures.of(items).failed == ()
    passed = {item.name for item in items if item.status is Status.PASS}
    assert {
        "KL of the target's distribution",
        "top-1 agreement",
        "no other layout drafts better",
        "temperature of plain text",
        "no undone fault betters the main model",
    } <= passed
