"""Real shapes of every family: sparse files without weights, tens of thousands of tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_checkpoint import make_released
from benchmarks.released import RELEASED
from cases import edit_json, export, nightly_but, run_program
from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.without_mtp import WITHOUT_MTP
from peak_memory import peak_bytes

# Tensors of the releases; those of compressed weights, scales, are not among them.
TENSORS = {"glm4_moe_lite": 9_703, "glm_moe_dsa": 59_870}


def tensors_of(model_type: str) -> dict[str, Any]:
    """The tensors that a release stores, by the family alone."""
    released = RELEASED[model_type]
    every = family_of(released.config).tensors
    return {name: spec for name, spec in every.items() if released.own_copies or not spec.optional}


@pytest.mark.parametrize("model_type", TENSORS)
def test_as_many_tensors_as_the_release(model_type: str) -> None:
    assert len(tensors_of(model_type)) == TENSORS[model_type]


@pytest.mark.parametrize("model_type", nightly_but(["glm4_moe_lite", "qwen3_5"], list(RELEASED)))
def test_inspect_and_plan(model_type: str, tmp_path: Path) -> None:
    source = make_released(tmp_path / "source", model_type)
    found = run_program("inspect", source, "--json")
    assert found.code == 0, found.err
    facts = json.loads(found.out)
    tensors = tensors_of(model_type)
    assert not facts["problems"] and facts["tensors"] >= len(tensors)
    planned = export(source, tmp_path / "out", "--dry-run", "--json")
    assert planned.code == 0, planned.err
    parts = json.loads(planned.out)["parts"]
    scales = facts["tensors"] - len(tensors)
    of_mtp = sum(spec.mtp_layer is not None for spec in tensors.values())
    released = RELEASED[model_type]
    copies = 0 if released.own_copies else len(family_of(released.config).shared)
    assert parts["mtp"]["tensors"] >= of_mtp + copies
    total = parts["main"]["tensors"] + parts["mtp"]["tensors"]
    assert total == len(tensors) + scales + copies


@pytest.mark.parametrize("model_type", WITHOUT_MTP)
def test_a_release_without_mtp_tensors_is_refused(
    model_type: str, source: Path, output: Path
) -> None:
    """Before its tensors are compared with what config.json promises; inspect counts them."""
    changes = {"model_type": model_type, "num_mtp_modules": 3, "num_nextn_predict_layers": 0}
    edit_json(source / "config.json", lambda config: config.update(changes))
    refused = export(source, output)
    assert refused.code == 4
    assert "There are no MTP tensors in this release" in refused.err
    assert not output.exists()
    shown = run_program("inspect", source)
    assert shown.code == 0
    assert "There are no MTP tensors in this release" in " ".join(shown.out.split())


@pytest.fixture(scope="module")
def bound_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Peak memory of the export of DeepSeek-V3's own shapes."""
    folder = tmp_path_factory.mktemp("v3")
    source = make_released(folder / "source", "deepseek_v3")
    peak = peak_bytes(source, folder / "out", "--part", "mtp")
    shutil.rmtree(folder)  # gigabytes, as all that is exported here
    return peak


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [name for name in RELEASED if name != "deepseek_v3"])
def test_the_mtp_part_is_exported(model_type: str, bound_bytes: int, tmp_path: Path) -> None:
    """Shards of the MTP layer alone are linked, those it shares with the main model are written.

    The peak of one and the same export varies by 6 % on a busy machine.
    """
    source = make_released(tmp_path / "source", model_type)
    assert peak_bytes(source, tmp_path / "out", "--part", "mtp") <= 1.1 * bound_bytes
    config = json.loads((tmp_path / "out/mtp/config.json").read_text())
    assert config == RELEASED[model_type].config
    shutil.rmtree(tmp_path)
