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
from family_drafts import CASES, GPU_MAINS, GPU_ONLY, LEFT, LEFT_OF_MAIN, MAINS, WHOLE
from safetensors.torch import load_file

from cases import export
from faults.small_model import family_config, write_dense
from runtime.checkpoints import changed

# The target's, which vLLM puts in their place.
DRAFTS, EVERY_MAIN = CASES | GPU_ONLY, MAINS | GPU_MAINS
SHARED = re.compile(r"model\.embed_tokens|lm_head|model\.layers\.\d+\.shared_head\.head")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    fields = {name: (name, more, "vllm") for name, (_, more, _) in DRAFTS.items()}
    fields |= {f"main {name}": (name, more, "hf") for name, (_, more) in EVERY_MAIN.items()}
    for key, (model_type, more, target) in fields.items():
        config = changed(family_config(model_type), **more) | WHOLE.get(model_type, {})
        source = write_dense(folder / key, config=config)
        made = export(source, folder / f"{key}-bundle", "--target", target, "--quiet")
        assert made.code == 0, made.err
    return {key: folder / f"{key}-bundle" for key in fields}


@pytest.fixture(scope="module")
def loadings(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for script, drafts, mains in (
        ("vllm_drafts", CASES, MAINS),
        ("vllm_gpu_only", GPU_ONLY, GPU_MAINS),
    ):
        job: dict[str, object] = {
            key: {
                "main": str(bundles[key] / "main"),
                "draft": str(bundles[key] / "mtp"),
                "method": "mtp" if key in drafts else "",
            }
            for key in (*drafts, *(f"main {model_type}" for model_type in mains))
        }
        path, folder = Path(__file__).with_name(f"{script}.py"), tmp_path_factory.mktemp(script)
        status, log, result = process(path, job, folder)
        assert status == 0, log[-3000:]
        found |= json.loads(result.read_text())
    return found


@pytest.mark.parametrize("model_type", DRAFTS)
def test_vllm_loads_every_tensor(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    name, _, layers = DRAFTS[model_type]
    found = loadings[model_type]
    assert found["class"] == name
    assert all(map(SHARED.match, found["untouched"])), found["untouched"]
    assert found["elements"] * layers == elements(
        bundles[model_type] / "mtp", *LEFT.get(model_type, ())
    )


@pytest.mark.parametrize("model_type", EVERY_MAIN)
def test_vllm_loads_every_tensor_of_a_main_model(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    key, left = f"main {model_type}", LEFT_OF_MAIN.get(model_type, ())
    found = loadings[key]
    assert found["class"] == EVERY_MAIN[model_type][0]
    assert [name for name in found["untouched"] if not name.startswith("visual.")] == []
    assert found["elements"] == elements(bundles[key] / "main", *left)


def elements(folder: Path, *left: str) -> int:
    """Numbers in the tensors of a folder, but those with one of some parts in their names."""
    files = folder.glob("*.safetensors")
    stored = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return sum(
        one.numel() for name, one in stored.items() if not any(part in name for part in left)
    )
