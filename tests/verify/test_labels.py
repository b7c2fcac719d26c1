"""Bits of bf16 under the label of fp16, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verify.foreign import GLM, GLM_MTP, Tensors, rewritten
from verify.test_mtp_values import failures

LINEAR, TABLE = f"{GLM_MTP}self_attn.q_proj.weight", f"{GLM_MTP}embed_tokens.weight"
WORDS = "is labelled {} and holds the bits of {}, by which its values are as is usual"


def cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().view(torch.bfloat16)


def labelled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().view(torch.float16)


def test_fp16_under_the_label_of_bf16_is_named(tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        stored[LINEAR] = cast(stored[LINEAR])

    (item,) = failures(rewritten(GLM, tmp_path / "damaged", change)).values()
    assert item["cause"].startswith(f"{LINEAR} {WORDS.format('BF16', 'F16')}")


@pytest.mark.parametrize("factor", [1000.0, 1e-5])
def test_a_matrix_of_another_size_is_not_mislabelled(factor: float, tmp_path: Path) -> None:
    def change(stored: Tensors) -> None:
        stored[LINEAR] = stored[LINEAR] * factor

    (item,) = failures(rewritten(GLM, tmp_path / "damaged", change)).values()
    assert "has a root mean square of" in item["cause"]


@pytest.mark.parametrize(("under", "types"), [(cast, ("BF16", "F16")), (labelled, ("F16", "BF16"))])
def test_a_table_under_another_label_is_of_no_other_checkpoint(
    under: Callable[[torch.Tensor], torch.Tensor], types: tuple[str, str], tmp_path: Path
) -> None:
    def change(stored: Tensors) -> None:
        stored[TABLE] = under(stored["model.embed_tokens.weight"])

    found = failures(rewritten(GLM, tmp_path / "damaged", change))
    causes = " ".join(item["cause"] for item in found.values())
    assert f"{TABLE} {WORDS.format(*types)}" in causes and "another checkpoint" not in causes
