"""Causes that are named for a weight which is not its source's: none without effect."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases import MTP_LAYER, export, quantize, run_program
from faults import planting
from faults.matrix import no_progress
from mtp_export.verify.check import Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.diagnosis import weight_bugs
from mtp_export.verify.diagnosis.regrouped import own_groups
from mtp_export.verify.options import VerifyOptions
from mtp_export.verify.weights.value_checks import run


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


def rows_zeroed(weight: torch.Tensor) -> torch.Tensor:
    weight[3:9] = 0
    return weight


def value_lost(weight: torch.Tensor) -> torch.Tensor:
    weight[3, 4] = torch.nan
    return weight


@pytest.fixture(scope="module")
def with_copies(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good bundle of few layers, whose draft has a head of its own."""
    folder = tmp_path_factory.mktemp("copies") / "bundle"
    assert export(pristine, folder, "--link", "copy", "--quiet").code == 0
    return folder


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (rows_zeroed, "lm_head.weight is damaged (6 of its 512 rows are zero), and"),
        (value_lost, "lm_head.weight is damaged (it has values that are not finite), and"),
        (lambda w: w * 1e5, "lm_head.weight is damaged (its root mean square is"),
        (torch.zeros_like, "lm_head.weight is damaged (its values are all the same), and"),
        (lambda w: w * 1.5, "is of another checkpoint"),
        (lambda w: w, ""),
    ],
)
def test_the_damaged_one_of_two_copies_is_named(
    damage: Callable[[torch.Tensor], torch.Tensor],
    said: str,
    with_copies: Path,
    tmp_path: Path,
) -> None:
    """Where both have precisions of their own, by what weights alone tell."""
    bundle = Path(shutil.copytree(with_copies, tmp_path / "bundle"))
    copy = f"model.layers.{MTP_LAYER}.shared_head.head.weight"
    planting.change(bundle / "mtp", copy, lambda weight: weight.float())
    planting.change(bundle / "main", "lm_head.weight", damage)
    planting.sign(bundle)
    options = VerifyOptions(bundle, level=Level.WEIGHTS)
    item = next(
        i for i in run(Context.open(options, no_progress)) if "head.weight is the" in i.name
    )
    assert (item.status is Status.PASS) is not bool(said)
    assert said in item.cause and item.subject in ("", copy, "lm_head.weight")
    assert ("lm_head" in item.subject) is ("damaged" in said)


def test_few_elements_that_differ_are_damage_of_either(with_copies: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(with_copies, tmp_path / "bundle"))
    planting.change(bundle / "main", "lm_head.weight", lambda w: w.fill_diagonal_(0.5))
    planting.sign(bundle)
    options = VerifyOptions(bundle, level=Level.WEIGHTS)
    item = next(
        i for i in run(Context.open(options, no_progress)) if "head.weight is the" in i.name
    )
    assert "one of the two is damaged" in item.cause


GROUP = 32


def grouped(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, its codes of 4 bits, each column in its place, and the scales of groups that are
    taken in an order of columns."""
    weight = torch.randn(64, len(columns), generator=torch.Generator().manual_seed(2))
    groups = weight[:, columns].unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = torch.empty_like(weight)
    codes[:, columns] = (groups / scale).round().flatten(1)
    return weight, codes, scale[..., 0]


def test_groups_of_columns_in_an_order_of_their_own_are_found() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    weight, codes, scale = grouped(order)
    found = own_groups(codes, scale, weight)
    assert found is not None and torch.equal(found[order], torch.arange(256) // GROUP)
    few = torch.arange(256)
    few[[3, 200]] = few[[200, 3]]
    weight, codes, scale = grouped(few)
    found = own_groups(codes, scale, weight)
    assert found is not None and found[[3, 200]].tolist() == [6, 0]


def test_other_faults_of_scales_are_no_groups_of_other_columns() -> None:
    weight, codes, scale = grouped(torch.arange(256))
    changed = {
        "none": (codes, scale),
        "whole groups": (codes, scale.roll(1, dims=1)),
        "rows": (codes, scale.roll(1, dims=0)),
        "codes": (codes.roll(40, dims=1), scale),
        "a factor": (codes, 3 * scale),
        "another's": (codes, 1 + torch.rand(scale.shape)),
        "one group": (codes, scale[:, :1]),
    }
    found = [name for name, (c, s) in changed.items() if own_groups(c, s, weight) is not None]
    assert not found
