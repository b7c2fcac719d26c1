"""vLLM's own classes load every tensor of the MTP layers of families that our runtime may not
compute, and of main models that transformers has no class for: names and shapes as exported, and
nothing is left as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from engine_runs import process
from family_drafts import CASES, MAINS
from safetensors.torch import load_file

from cases import export
from faults.small_model import family_config, write_dense

# The target's, which vLLM puts in their place.
SHARED = re.compile(r"model\.embed_tokens|lm_head|model\.layers\.\d+\.shared_head\.head")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    fields = {name: more for name, (_, more, _) in CASES.items()}
    fields |= {name: more for name, (_, more) in MAINS.items()}
    for model_type, more in fields.items():
        source = write_dense(folder / model_type, config=family_config(model_type) | more)
        target = "vllm" if model_type in CASES else "hf"
        made = export(source, folder / f"{model_type}-bundle", "--target", target, "--quiet")
        assert made.code == 0, made.err
    return {model_type: folder / f"{model_type}-bundle" for model_type in fields}


@pytest.fixture(scope="module")
def loadings(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    job = {
        f"{method} {model_type}": {
            "main": str(bundles[model_type] / "main"),
            "draft": str(bundles[model_type] / "mtp"),
            "method": method,
        }
        for method, families in (("mtp", CASES), ("", MAINS))
        for model_type in families
    }
    script = Path(__file__).with_name("vllm_drafts.py")
    status, log, result = process(script, job, tmp_path_factory.mktemp("vllm"))
    assert status == 0, log[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("model_type", CASES)
def test_vllm_loads_every_tensor(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    name, _, layers = CASES[model_type]
    found = loadings[f"mtp {model_type}"]
    assert found["class"] == name
    assert all(map(SHARED.match, found["untouched"])), found["untouched"]
    assert found["elements"] * layers == elements(bundles[model_type] / "mtp")


@pytest.mark.parametrize("model_type", MAINS)
def test_vllm_loads_every_tensor_of_a_main_model(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    found = loadings[f" {model_type}"]
    assert (found["class"], found["untouched"]) == (MAINS[model_type][0], [])
    assert found["elements"] == elements(bundles[model_type] / "main")


def elements(folder: Path) -> int:
    files = folder.glob("*.safetensors")
    return sum(tensor.numel() for path in files for tensor in load_file(path).values())
