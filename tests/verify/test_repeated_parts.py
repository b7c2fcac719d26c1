"""Linears of which a part holds the same as another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verify.foreign import GLM, GLM_MTP, Tensors, rewritten
from verify.test_mtp_values import failures

ITEM = "no part of a weight twice"
UP_PROJ = f"{GLM_MTP}mlp.experts.3.up_proj.weight"
NORM = f"{GLM_MTP}shared_head.norm.weight"
O_PROJ, K_PROJ, V_PROJ = (f"{GLM_MTP}self_attn.{one}_proj.weight" for one in "okv")


def columns_twice(stored: Tensors) -> None:
    stored[O_PROJ][:, 64:96] = stored[O_PROJ][:, :32]


def rows_twice(stored: Tensors) -> None:
    stored[K_PROJ][32:] = stored[K_PROJ][:32]


def rows_of_expert_twice(stored: Tensors) -> None:
    """By whose norms it goes with the rest of its MLP no longer."""
    stored[UP_PROJ][32:] = stored[UP_PROJ][:32]


def norm_twice(stored: Tensors) -> None:
    stored[NORM][64:] = stored[NORM][:64]


def heads_repeated(stored: Tensors) -> None:
    """As for more ranks than there are heads of keys and values."""
    for name in (K_PROJ, V_PROJ):
        stored[name][32:] = stored[name][:32]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (columns_twice, f"columns 64 to 95 of {O_PROJ} hold the same as its columns 0 to 31: "),
        (rows_twice, f"rows 32 to 63 of {K_PROJ} hold the same as its rows 0 to 31: "),
        (rows_of_expert_twice, f"rows 32 to 63 of {UP_PROJ} hold the same as its rows 0 to 31: "),
        (norm_twice, f"elements 64 to 127 of {NORM} hold the same as its elements 0 to 63: "),
    ],
)
def test_a_part_that_was_written_for_two_is_named_with_both(
    damage: Callable[[Tensors], None], words: str, tmp_path: Path
) -> None:
    found = failures(rewritten(GLM, tmp_path / "damaged", damage))
    assert [*found] == [ITEM] and found[ITEM]["cause"].startswith(words)


def test_heads_of_keys_and_values_may_be_repeated_in_both(tmp_path: Path) -> None:
    assert ITEM not in failures(rewritten(GLM, tmp_path / "repeated", heads_repeated))


def test_norms_of_two_values_may_repeat_themselves(tmp_path: Path) -> None:
    def narrow(stored: Tensors) -> None:
        stored[NORM][:] = 1
        stored[NORM][::5] = 1.0078125

    assert ITEM not in failures(rewritten(GLM, tmp_path / "narrow", narrow))


def test_rows_of_one_value_are_no_repetition(tmp_path: Path) -> None:
    def filled(stored: Tensors) -> None:
        stored[O_PROJ][32:64] = torch.tensor(0.02)

    found = failures(rewritten(GLM, tmp_path / "filled", filled))
    words = found["mtp: no block of one code"]["cause"]
    assert ITEM not in found
    assert words.startswith(f"the values in rows 32 to 63 of {O_PROJ}, a quarter of it, are alike")
