"""Codes of which bits were lost, and values that were made from such: every value, or every second
row or column, of one sign or zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verify.foreign import GLM, GLM_MTP, Tensors, rewritten
from verify.foreign_damages import each
from verify.foreign_folders import Folder, both
from verify.test_foreign_folders import verified
from verify.test_mtp_values import failures

ITEM = "codes with all their bits"
LINEAR = "self_attn.q_proj"


def low_half(codes: torch.Tensor) -> torch.Tensor:
    """The low half of each byte alone."""
    return (codes.contiguous().view(torch.uint8) & 0x0F).view(codes.dtype).view_as(codes)


@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("compressed-tensors, int4", "the odd columns (1, 3, 5 and so on)"),
        ("awq", "4 of every 8 rows (2, 3, 6, 7 and so on)"),
        ("gptq, 8 bits", "all values"),
    ],
)
def test_lost_halves_of_bytes_are_named_with_their_place(
    method: str, place: str, tmp_path: Path
) -> None:
    name = rf"{GLM_MTP}{LINEAR}\.(qweight|weight_packed|weight)$"
    folder = Folder("", both(method, "lm_head"), each(name, low_half)).write(tmp_path / "damaged")
    _, failed = verified(folder, "weights")
    (item,) = (one for one in failed if one["name"] == ITEM)
    assert item["cause"].startswith(f"{place} of {GLM_MTP}{LINEAR}.")
    assert "bits of its packed codes, or its zero points, were lost" in item["cause"]


def test_whole_codes_pass(tmp_path: Path) -> None:
    _, failed = verified(Folder("", both("awq", "lm_head")).write(tmp_path / "good"), "weights")
    assert ITEM not in [one["name"] for one in failed]


def odd_columns(stored: Tensors) -> None:
    stored[f"{GLM_MTP}{LINEAR}.weight"][:, 1::2] = 0


def rows_of_projection(stored: Tensors) -> None:
    stored[f"{GLM_MTP}eh_proj.weight"][::4] = 0


def signs(stored: Tensors) -> None:
    stored[f"{GLM_MTP}{LINEAR}.weight"].abs_()


def elements_of_norm(stored: Tensors) -> None:
    stored[f"{GLM_MTP}hnorm.weight"][::2] = 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (odd_columns, f"the odd columns (1, 3, 5 and so on) of {GLM_MTP}{LINEAR}.weight are zero"),
        (rows_of_projection, f"2 of every 8 rows (0, 4 and so on) of {GLM_MTP}eh_proj.weight are"),
        (signs, f"all values of {GLM_MTP}{LINEAR}.weight are of one sign: its signs were lost"),
        (elements_of_norm, f"the even elements (0, 2, 4 and so on) of {GLM_MTP}hnorm.weight are"),
    ],
)
def test_what_unquantized_weights_lost_is_named(
    damage: Callable[[Tensors], None], words: str, tmp_path: Path
) -> None:
    found = failures(rewritten(GLM, tmp_path / "damaged", damage))
    assert [*found] == [ITEM] and found[ITEM]["cause"].startswith(words)
    assert "packed" not in found[ITEM]["cause"]


def test_a_scale_by_which_a_matrix_is_zero_is_named(tmp_path: Path) -> None:
    """And not the matrix, whose codes are there."""
    scale = f"{GLM_MTP}{LINEAR}.weight_scale"
    start, lost = both("modelopt fp8, in a file", "lm_head"), each(f"{scale}$", torch.zeros_like)
    _, failed = verified(Folder("", start, lost).write(tmp_path / "damaged"), "weights")
    (item,) = (one for one in failed if one["name"] == "mtp: no constant tensor")
    words = f"{scale} is zero, so that {GLM_MTP}{LINEAR}.weight decodes to zero throughout: "
    assert item["cause"].startswith(words)


def test_scales_by_which_a_part_is_zero_are_named(tmp_path: Path) -> None:
    def first_groups(scales: torch.Tensor) -> torch.Tensor:
        scales[:2] = 0
        return scales

    lost = each(f"{GLM_MTP}{LINEAR}.scales$", first_groups)
    folder = Folder("", both("awq", "lm_head"), lost).write(tmp_path / "damaged")
    _, failed = verified(folder, "weights")
    causes = " ".join(item["cause"] for item in failed)
    assert "scales of it are zero: they were lost, or never written" in causes
    assert "too coarse" not in causes


def test_zero_rows_of_codes_of_a_byte_each_are_no_lost_halves_of_bytes(tmp_path: Path) -> None:
    def odd_rows(codes: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(len(codes)) % 2 == 0
        return (codes.view(torch.uint8) * kept[:, None]).view(codes.dtype)

    damage = each(rf"{GLM_MTP}{LINEAR}\.weight$", odd_rows)
    folder = Folder("", both("compressed-tensors, fp8", "lm_head"), damage)
    _, failed = verified(folder.write(tmp_path / "damaged"), "weights")
    (item,) = (one for one in failed if one["name"] == ITEM)
    assert "are zero: they were never written, or lost before it was stored" in item["cause"]
