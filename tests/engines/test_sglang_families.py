"""SGLang's own classes load every tensor of MTP layers, of families that vLLM has no class for, or
does not build, among others, and of main models that neither transformers nor vLLM has a class
for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import process, sglang_wheel
from family_drafts import SGLANG, SGLANG_MAINS
from test_family_drafts import elements

from cases import export
from faults.small_model import family_config, write_dense

# The target's, which SGLang puts in their place.
SHARED = {"model.embed_tokens.weight", "model.word_embeddings.weight", "lm_head.weight"}
COPIES = (".embed_tokens.", ".shared_head.head.")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    for model_type in SGLANG | SGLANG_MAINS:
        source = write_dense(folder / model_type, config=family_config(model_type))
        made = export(source, folder / f"{model_type}-bundle", "--target", "sglang", "--quiet")
        assert made.code == 0, made.err
    return {model_type: folder / f"{model_type}-bundle" for model_type in SGLANG | SGLANG_MAINS}


@pytest.fixture(scope="module")
def loadings(
    bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    drafts = {name: (reader, "mtp") for name, reader in SGLANG.items()}
    mains = {f"main {name}": (reader, "main") for name, reader in SGLANG_MAINS.items()}
    job: dict[str, object] = {
        key: {
            "folder": str(bundles[key.rpartition(" ")[2]] / part),
            "module": reader.module,
            "name": reader.name,
            "fields": reader.fields,
        }
        for key, (reader, part) in (drafts | mains).items()
    }
    script, folder = Path(__file__).with_name("sglang_families.py"), tmp_path_factory.mktemp("job")
    status, log, result = process(script, job | {"wheel": str(sglang_wheel())}, folder)
    assert status == 0, log[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("model_type", SGLANG)
def test_sglang_loads_every_tensor(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    found, layers = loadings[model_type], SGLANG[model_type].layers
    assert set(found["untouched"]) <= SHARED
    left = () if found["embedding"] else COPIES
    of_layer = found["elements"] - found["embedding"]  # which all layers share
    assert of_layer * layers + found["embedding"] == elements(bundles[model_type] / "mtp", *left)


@pytest.mark.parametrize("model_type", SGLANG_MAINS)
def test_sglang_loads_every_tensor_of_a_main_model(
    model_type: str, bundles: dict[str, Path], loadings: dict[str, dict[str, Any]]
) -> None:
    found = loadings[f"main {model_type}"]
    assert found["untouched"] == []
    assert found["elements"] == elements(bundles[model_type] / "main")
