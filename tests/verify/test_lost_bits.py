"""Codes of which bits were lost: every value, or every second row or column, of one sign or
zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verify.foreign import GLM_MTP
from verify.foreign_damages import each
from verify.foreign_folders import Folder, both
from verify.test_foreign_folders import verified

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
