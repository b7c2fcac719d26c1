"""Weights whose values alone show that they were cut off, or lost in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import export
from faults.fault import Fault
from faults.matrix import no_progress
from faults.suspected_faults import SUSPECTED_VALUE_FAULTS
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.weights import cut_off

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def judged(bundle: Path) -> list[Item]:
    options = VerifyOptions(bundle, None, Level.WEIGHTS, checksums=False)
    return [*cut_off.run(Context.open(options, no_progress))]


@pytest.mark.parametrize("fault", SUSPECTED_VALUE_FAULTS, ids=lambda fault: fault.name)
def test_what_is_cut_off_or_lost_is_named(fault: Fault, tmp_path: Path) -> None:
    """And nothing else of the bundle, which passes as it is."""
    bundle = tmp_path / "bundle"
    assert export(FIXTURES / fault.needs, bundle, "--link", "copy", "--quiet").code == 0
    [item] = judged(bundle)
    assert item.status is Status.PASS
    fault.plant(bundle)
    [item] = judged(bundle)
    assert item.status is Status.FAIL
    assert fault.cause in item.cause and item.cause.count(";") == 0
