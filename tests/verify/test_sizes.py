"""Linears and projections of a module beside all others of the model, by their sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.foreign import FIXTURES, GLM, GLM_MTP, Tensors, rewritten
from verify.test_mtp_values import failures


@pytest.mark.parametrize("factor", [32, 1 / 100])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        (GLM, f"{GLM_MTP}eh_proj.weight"),
        (GLM, f"{GLM_MTP}mlp.shared_experts.up_proj.weight"),
        (FIXTURES / "qwen3-5-tiny", "mtp.fc.weight"),
    ],
    ids=["projection", "shared expert", "fc"],
)
def test_a_linear_with_few_of_its_kind_is_compared_with_all(
    source: Path, name: str, factor: float, tmp_path: Path
) -> None:
    def multiply(stored: Tensors) -> None:
        stored[name] = stored[name] * factor

    (item,) = failures(rewritten(source, tmp_path / "damaged", multiply)).values()
    assert (item["name"], item["subject"]) == ("every matrix near its like", name)
    assert "of all other linears by its root mean square" in item["cause"]
