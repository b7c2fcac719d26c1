"""Causes that are named for a weight which is not its source's: none without effect."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases import quantize, run_program
from faults import planting
from mtp_export.verify.diagnosis import weight_bugs


def test_a_weight_that_came_by_way_of_bf16(row_sources: dict[str, Path], tmp_path: Path) -> None:
    """Codes of fp8 that were made again are near the source's, and not of scales in another order:
    where a weight has one block, or equal ones, every order is the same."""
    source, bf16, again = row_sources["fp8"], tmp_path / "bf16", tmp_path / "again"
    assert quantize(source, bf16, "--base-quant", "bf16", "--mtp-quant", "bf16").code == 0
    assert quantize(bf16, again, "--base-quant", "a8w8_fp8", "--mtp-quant", "a8w8_fp8").code == 0
    verified = run_program("verify", again, "--source", source, "--level", "weights")
    assert verified.code == 7
    said = " ".join(verified.out.split())
    assert "close to the source's" in said and "axis" not in said, said


def test_damage_behind_the_rows_that_are_looked_at_is_counted(
    row_bundle: Callable[[str, str], Path],
    row_sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_bugs, "_SAMPLE_ELEMENTS", 1)
    bundle = Path(shutil.copytree(row_bundle("int8", "fp8"), tmp_path / "bundle"))

    def end_lost(weight: torch.Tensor) -> torch.Tensor:
        assert len(weight) > 128, "the rows that are looked at"
        return torch.cat([weight.view(-1)[:-9], torch.zeros(9)]).to(weight.dtype).view_as(weight)

    planting.change(bundle / "main", "lm_head.weight", end_lost)
    verified = run_program("verify", bundle, "--source", row_sources["fp8"], "--level", "weights")
    assert ": 9 of its " in " ".join(verified.out.split()), verified.out
