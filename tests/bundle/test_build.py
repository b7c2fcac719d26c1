"""A run of a plan: what it reports at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mtp_export.bundle import build
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.export import plan_export
from mtp_export.bundle.options import BundleOptions


def test_the_end_of_a_run(pristine: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=iter([100.0, 103.5]).__next__)
    monkeypatch.setattr(build, "time", clock)
    plan, counted = plan_export(BundleOptions(pristine, output)), list[int]()
    result = run_bundle(plan, counted.append)
    assert (result.plan, result.seconds, result.resumed_shards) == (plan, 3.5, 0)
    assert result.facts == {}
    assert sum(counted) == plan.written_bytes + plan.checked_bytes
