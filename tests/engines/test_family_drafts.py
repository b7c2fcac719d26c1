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
from family_drafts import VLLM, VLLM_MAINS
from safetensors.torch import load_file

from cases import export
from faults.small_model import family_config, write_dense
from runtime.checkpoints import EXAMPLES, changed

# The target's, which vLLM puts in their place.
SHARED = re.compile(r"model\.embed_tokens|lm_head|model\.layers\.\d+\.shared_head\.head")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    made_for = {name: (name, reader, "vllm") for name, reader in VLLM.items()}
    made_for |= {f"main {name}": (name, reader, "hf") for name, reader in VLLM_MAINS.items()}
    for key, (model_type, reader, target) in made_for.items():
        config = changed(family_config(model_type), **reader.fields)
        source = write_dense(folder / key, config=config | dict(EXAMPLES[model_type].whole))
        made = export(source, folder / f"{key}-bundle", "--target", target, "--quiet")
        assert made.code == 0, made.err
    return {key: folder / f"{key}-bundle" for key in made_for}


@pytest.fixture(scope="module")
def loadings(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    drafts = {name: (reader, "mtp") for name, reader in VLLM.items()}
    mains = {f"main {name}": (reader, "") for name, reader in VLLM_MAINS.items()}
    for script, needs_gpu in (("vllm_drafts", False), ("vllm_gpu_only", True)):
        job: dict[str, object] = {
            key: {
                "main": str(bundles[key] / "main"),
                "draft": str(bundles[key] / "mtp"),
                "method": method,
            }
            for key, (reader, method) in (drafts | mains).items()
            if reader.needs_gpu == needs_gpu
        }
        path, folder = Path(__file__).with_name(f"{script}.py"), tmp_path_factory.mktemp(script)
        status, log, result = process(path, job, folder)
        assert status == 0, log[-3000:]
        found |= json.loads(result.read_text())
    return found


@pytest.mark.parametrize("model_type", VLLM)
def test_vllm_loads_every_tensor(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    reader, found = VLLM[model_type], loadings[model_type]
    assert found["class"] == reader.name
    assert all(map(SHARED.match, found["untouched"])), found["untouched"]
    own = elements(bundles[model_type] / "mtp", *reader.left)
    assert found["elements"] * reader.layers == own


@pytest.mark.parametrize("model_type", VLLM_MAINS)
def test_vllm_loads_every_tensor_of_a_main_model(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    key, reader = f"main {model_type}", VLLM_MAINS[model_type]
    found = loadings[key]
    assert found["class"] == reader.name
    assert [name for name in found["untouched"] if not name.startswith("visual.")] == []
    assert found["elements"] == elements(bundles[key] / "main", *reader.left)


def elements(folder: Path, *left: str) -> int:
    """Numbers in the tensors of a folder, but those with one of some parts in their names."""
    files = folder.glob("*.safetensors")
    stored = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return sum(
        one.numel() for name, one in stored.items() if not any(part in name for part in left)
    )
