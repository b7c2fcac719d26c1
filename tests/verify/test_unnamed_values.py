"""Values of MTP tensors of a model that has no family here: what their names and dtypes tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import run_program
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_export.verify.weights import unnamed_values
from verify.foreign import GLM, GLM_MTP, Config, Tensors, rewritten
from verify.test_mtp_values import less_one, without_embedding_half, zeroed_rows


def unknown(config: Config) -> None:
    config.update(model_type="nobody_knows", architectures=["NobodyKnowsForCausalLM"])


def judged(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the items of check `ledger` by name."""
    outcome = run_program("verify", folder, "--level", "weights", "--json", "--quiet")
    checks = {check["name"]: check for check in json.loads(outcome.out)["checks"]}
    return outcome.code, {item["name"]: item for item in checks["ledger"]["items"]}


def not_finite(stored: Tensors) -> None:
    stored[f"{GLM_MTP}self_attn.q_proj.weight"][3, 5] = float("nan")


def never_written(stored: Tensors) -> None:
    stored[f"{GLM_MTP}self_attn.q_proj.weight"].zero_()


def equal_experts(stored: Tensors) -> None:
    experts = f"{GLM_MTP}mlp.experts."
    stored[f"{experts}1.up_proj.weight"] = stored[f"{experts}0.up_proj.weight"].clone()


DAMAGE: dict[str, tuple[Callable[[Tensors], None], str, str]] = {
    "not finite": (not_finite, "mtp: finite values", "self_attn.q_proj.weight: 1 value"),
    "never written": (never_written, "mtp: no constant tensor", "q_proj.weight is constant"),
    "zeroed rows": (zeroed_rows, "mtp: no block rounded to zero", "rows 64 to 127 of"),
    "zeroed half": (without_embedding_half, "mtp: halves of eh_proj", "the first half"),
    "norms of 1 + w": (less_one, "mtp: norms as the main model's", "input_layernorm.weight lies"),
    "equal experts": (equal_experts, "mtp: no matrix is stored twice", "experts.0.up_proj"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    change, item, words = DAMAGE[damage]
    code, items = judged(rewritten(GLM, tmp_path / "damaged", change, unknown))
    assert code == 7
    assert words in items[item]["cause"]


def test_fused_experts_are_read_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many experts a tensor has; rows are counted over those before."""
    most, read = 2 * 64 * 256, list[int]()
    rows = TensorReader.rows

    def counted(reader: TensorReader, start: int, stop: int) -> torch.Tensor:
        found = rows(reader, start, stop)
        read.append(found.numel())
        return found

    monkeypatch.setattr(unnamed_values, "PIECE_ELEMENTS", most)
    monkeypatch.setattr(TensorReader, "rows", counted)

    def fused(stored: Tensors) -> None:
        wide = [stored[f"{GLM_MTP}mlp.experts.{n}.up_proj.weight"].repeat(1, 2) for n in range(8)]
        joined = stored[f"{GLM_MTP}mlp.experts.up_proj"] = torch.stack(wide)
        assert joined.shape == (8, 64, 256)
        joined[5, :, :128] = 0

    code, items = judged(rewritten(GLM, tmp_path / "fused", fused, unknown))
    assert code == 7
    cause = items["mtp: no block rounded to zero"]["cause"]
    assert "rows 320 to 383, columns 0 to 127 of" in cause
    assert max(read) == most


def test_a_good_module_passes_and_what_is_not_tested_is_said(tmp_path: Path) -> None:
    code, items = judged(rewritten(GLM, tmp_path / "good", config=unknown))
    assert code == 0
    statuses = {name: item["status"] for name, item in items.items()}
    assert statuses["mtp: finite values"] == statuses["mtp: norms as the main model's"] == "pass"
    left = items["mtp: values by the model's family"]
    assert left["status"] == "not tested" and "copies of embedding" in left["cause"]


def test_main_norms_of_1_plus_w_ask_for_the_module_s_own(tmp_path: Path) -> None:
    """All of a model's: it is how its engines take them; and the module's alone."""

    def centred(stored: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in stored:
            if "norm" in name and stored[name].dim() == 1:
                values = torch.randn(stored[name].shape, generator=generator) / 8
                stored[name] = values.to(stored[name].dtype)

    def main_alone(stored: Tensors) -> None:
        own = {name: one.clone() for name, one in stored.items() if name.startswith(GLM_MTP)}
        centred(stored)
        stored |= own

    code, _ = judged(rewritten(GLM, tmp_path / "every", centred, unknown))
    assert code == 0
    code, items = judged(rewritten(GLM, tmp_path / "main", main_alone, unknown))
    assert code == 7
    assert "lies around 1" in items["mtp: norms as the main model's"]["cause"]


def test_codes_are_not_taken_for_values(tmp_path: Path) -> None:
    def packed(stored: Tensors) -> None:
        name = f"{GLM_MTP}self_attn.q_proj"
        stored[f"{name}.weight_packed"] = torch.zeros(8, 8, dtype=torch.int32)
        del stored[f"{name}.weight"]

    code, items = judged(rewritten(GLM, tmp_path / "packed", packed, unknown))
    left = items["mtp: values by the model's family"]["cause"]
    assert "1 of 44 tensors" in left, left
    assert items["mtp: no constant tensor"]["status"] == "pass"
