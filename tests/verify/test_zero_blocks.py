"""Blocks of a linear of the module that are zero, wherever they lie: one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from verify.foreign import GLM, GLM_MTP, Tensors, rewritten
from verify.test_mtp_values import failures

UP, EH = f"{GLM_MTP}mlp.experts.0.up_proj.weight", f"{GLM_MTP}eh_proj.weight"
ZERO, CONSTANT = "mtp: no block rounded to zero", "mtp: no constant tensor"


@pytest.mark.parametrize(
    ("name", "rows", "columns", "item"),
    [
        (EH, slice(None), slice(None), CONSTANT),
        (UP, slice(0, 32), slice(64, 128), ZERO),
        (UP, slice(16, 48), slice(32, 96), ZERO),
    ],
    ids=["the projection", "a tile", "a tile off the grid"],
)
def test_what_is_zero_is_told_once(
    name: str, rows: slice, columns: slice, item: str, tmp_path: Path
) -> None:
    def zero(stored: Tensors) -> None:
        stored[name][rows, columns] = 0

    found = failures(rewritten(GLM, tmp_path / "damaged", zero))
    assert [(one["name"], one["subject"]) for one in found.values()] == [(item, name)]


def test_a_block_off_the_grid_is_found_in_small_matrices(tmp_path: Path) -> None:
    small = write_checkpoint(tmp_path / "small", SMALL_CONFIGS["deepseek_v4"])
    name = "mtp.0.attn.wo_a.weight"

    def zero(stored: Tensors) -> None:
        stored[name][16:48, 16:48] = 0

    (item,) = failures(rewritten(small, tmp_path / "damaged", zero)).values()
    assert f"rows 16 to 47, columns 16 to 47 of {name} are zero" in item["cause"]


def test_zeros_that_lie_about_are_no_lost_block(tmp_path: Path) -> None:
    """As where single large weights share a scale with small ones."""

    def scatter(stored: Tensors) -> None:
        kept = torch.rand(16, 32, generator=torch.Generator().manual_seed(3)) < 0.2
        stored[UP][:16, :32] *= kept

    assert failures(rewritten(GLM, tmp_path / "scattered", scatter)) == {}
