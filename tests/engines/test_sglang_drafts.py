"""SGLang's own class loads every tensor of our EAGLE-3 drafts, the layer under either of its names,
and its target taps the layers that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import FIXTURE, process, sglang_wheel
from safetensors.torch import load_file

from mtp_checkpoints.families.eagle3 import Eagle3Family, eagle3_config, usual_taps
from mtp_runtime.loading.draft_folder import read_draft
from mtp_runtime.models.eagle3 import checked_tensors, target_tokens
from runtime.drafts import eagle3_tensors, save_draft

LAYERS = 61
DRAFT_VOCAB = 512
VARIANTS: dict[str, dict[str, object]] = {
    "usual": {},
    "normed": {"fc_norm": True, "norm_output": True},
    "older name of fc_norm": {"use_aux_norm": True},
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random drafts for the fixture, and one whose layer has its other name."""
    folder, found = tmp_path_factory.mktemp("drafts"), {}
    target = json.loads((FIXTURE / "config.json").read_text())
    for number, (name, changes) in enumerate(VARIANTS.items()):
        config = eagle3_config(target, usual_taps(LAYERS), DRAFT_VOCAB, "float32") | changes
        found[name] = save_draft(folder / str(number), config, eagle3_tensors(config))
    tensors = load_file(found["usual"] / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    config = json.loads((found["usual"] / "config.json").read_text())
    found["layers.0"] = save_draft(folder / "renamed", config, renamed)
    whole = eagle3_config(target, usual_taps(LAYERS), target["vocab_size"], "float32")
    own_head = eagle3_tensors(whole) | {"lm_head.weight": eagle3_tensors(config)["lm_head.weight"]}
    own_head["lm_head.weight"] = own_head["lm_head.weight"].repeat(4, 1)
    found["whole vocabulary"] = save_draft(folder / "whole", whole, own_head)
    return found


@pytest.fixture(scope="module")
def answers(drafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = {
        "wheel": str(sglang_wheel()),
        "drafts": {name: str(folder) for name, folder in drafts.items()},
        "layers": LAYERS,
        "taps": [list(usual_taps(LAYERS)), [1, 29, 57]],
    }
    script = Path(__file__).with_name("sglang_drafts.py")
    status, log, result = process(script, job, tmp_path_factory.mktemp("sglang"))
    assert status == 0, log[-3000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("name", [*VARIANTS, "layers.0", "whole vocabulary"])
def test_every_tensor_is_loaded(
    name: str, drafts: dict[str, Path], answers: dict[str, Any]
) -> None:
    """The embedding is the target's; what the draft ids mean is what our reader takes of them."""
    found, draft = answers["drafts"][name], read_draft(drafts[name])
    assert found["skipped"] == []
    assert found["untouched"] == ["model.embed_tokens.weight"]
    tensors = checked_tensors(draft, Eagle3Family.from_config(draft.config))
    embedding = draft.config["vocab_size"] * draft.config["hidden_size"]
    stored = load_file(drafts[name] / "model.safetensors")
    own = sum(one.numel() for key, one in stored.items() if key not in ("d2t", "t2d"))
    assert found["elements"] == own + embedding
    if "d2t" in tensors:
        assert found["tokens"] == target_tokens(stored["d2t"]).tolist()
    else:
        assert found["tokens"] is None


def test_the_layers_that_we_name_are_tapped(answers: dict[str, Any]) -> None:
    """Ids that begin with 1 are counted otherwise, which is why we write none."""
    assert answers["taps"]["2"] == list(usual_taps(LAYERS))
    assert answers["taps"]["1"] == [2, 30, 58]
