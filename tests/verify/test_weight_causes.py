"""Causes that are named for a weight which is not its source's: none without effect."""

from __future__ import annotations

from pathlib import Path

from cases import quantize, run_program


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
