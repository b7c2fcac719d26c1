"""Weights of which a run of rows, columns or elements was multiplied."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest

from cases import export
from faults import planting
from faults.fault import Fault
from faults.matrix import no_progress
from faults.suspected_faults import SCALED_RUN_FAULTS
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.gates import MOST_STEPS
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.weights import scaled_runs

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def judged(bundle: Path) -> Item:
    options = VerifyOptions(bundle, None, Level.WEIGHTS, checksums=False)
    [item] = scaled_runs.run(Context.open(options, no_progress))
    return item


def exported(fixture: str, bundle: Path) -> Path:
    assert export(FIXTURES / fixture, bundle, "--link", "copy", "--quiet").code == 0
    return bundle


@pytest.mark.parametrize("fault", SCALED_RUN_FAULTS, ids=lambda fault: fault.name)
def test_a_part_that_was_multiplied_is_named(fault: Fault, tmp_path: Path) -> None:
    """And nothing else of the bundle, which passes as it is."""
    bundle = exported(fault.needs, tmp_path / "bundle")
    assert judged(bundle).status is Status.PASS
    fault.plant(bundle)
    item = judged(bundle)
    assert item.status is Status.FAIL
    assert fault.cause in item.cause and item.cause.count(";") == 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_values_that_are_not_finite_are_no_part_of_another_size(value: float) -> None:
    """Another item names them, and nothing is printed of them here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scaled_runs._step([1.0] * 255 + [value]) is None


def test_heads_of_another_size_pass(tmp_path: Path) -> None:
    bundle = exported("glm4-moe-tiny", tmp_path / "bundle")
    double_first_rows(bundle, "model.layers.1.self_attn.v_proj.weight")
    assert judged(bundle).status is Status.PASS


def test_a_model_that_was_made_so_passes(tmp_path: Path) -> None:
    """As one whose channels were sorted before some were pruned."""
    bundle = exported("glm4-moe-tiny", tmp_path / "bundle")
    first, *rest = (
        f"model.layers.1.mlp.experts.{n}.gate_proj.weight" for n in range(MOST_STEPS + 1)
    )
    double_first_rows(bundle, *rest)
    assert judged(bundle).cause.count("times as large") == MOST_STEPS
    double_first_rows(bundle, first)
    assert judged(bundle).status is Status.PASS


def double_first_rows(bundle: Path, *names: str) -> None:
    """Double a quarter of the rows of weights of the main model."""
    weights = {name: planting.read(bundle / "main", name) for name in names}
    for weight in weights.values():
        weight[: len(weight) // 4] *= 2
    planting.write(bundle / "main", weights)
