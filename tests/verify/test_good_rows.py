"""Good bundles pass when they run: within the gates of their source, no other layout drafts better,
drafts depend on their inputs. Here the two rows that lose the most, on a little text;
`python -m faults.good_rows` runs every row on more."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.good_rows import FIXTURE, Figures, Good, items_of
from faults.sweep import prompts_of
from mtp_export.verify.check import Status
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model


@pytest.fixture(scope="module")
def source() -> Model:
    return load_model(FIXTURE, LoadOptions()).model


@pytest.mark.parametrize("name", ["int4 everywhere", "wint4"])
def test_good_bundle_runs_as_its_source(name: str, source: Model, tmp_path: Path) -> None:
    good = Good.written(name, tmp_path / "bundle")
    items = items_of(good, source=source, prompts=prompts_of(0, 8), tokens=12)
    assert Figures.of(items).failed == ()
    passed = {item.name for item in items if item.status is Status.PASS}
    assert {
        "KL of the target's distribution",
        "top-1 agreement",
        "no other layout drafts better",
    } <= passed
