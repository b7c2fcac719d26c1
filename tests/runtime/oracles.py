"""transformers' models of the checkpoints that the tests write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

# transformers' class of a family that has none of its own, whose main model it computes too.
SAME_MAIN_MODEL = {"mimo": ("qwen2", "Qwen2ForCausalLM")}

# Families whose MTP layers transformers' MtpModel loads, with the fields that it needs.
MTP_MODEL: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "hy_v3": {"mtp_mlp_layer_types": ["sparse"]},
    "mellum": {},
    "bailing_hybrid": {
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["sparse"],
    },
    "qwen3_next": {"mtp_layer_types": ["full_attention"]},
    "qwen3_5_text": {"mtp_layer_types": ["full_attention"]},
    "qwen3_5_moe_text": {"mtp_layer_types": ["full_attention"]},
    "exaone_moe": {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
}


def rename_tensors(path: Path, part: str, other: str) -> None:
    """Replace a part of tensors' names in a checkpoint of one file."""
    file = path / "model.safetensors"
    tensors = {name.replace(part, other): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def oracle(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model; it finds MTP layers by the layer numbers of the releases alone."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] in SAME_MAIN_MODEL:
        model_type, architecture = SAME_MAIN_MODEL[config["model_type"]]
        config |= {"model_type": model_type, "architectures": [architecture]}
        original, path = path, path.with_name(f"{path.name}-as-{model_type}")
        shutil.copytree(original, path)
        (path / "config.json").write_text(json.dumps(config))
    kind = getattr(transformers, config["architectures"][0])
    layers = config.get("text_config", config)["num_hidden_layers"]
    patterns = [rf"model\.(language_model\.)?layers\.{layers}\..*", r"mtp_layers\."]
    for owner in kind.__mro__:
        if "_keys_to_ignore_on_load_unexpected" in vars(owner):
            known = vars(owner)["_keys_to_ignore_on_load_unexpected"] or []
            others = [pattern for pattern in known if "layers" not in pattern]
            monkeypatch.setattr(owner, "_keys_to_ignore_on_load_unexpected", [*others, *patterns])
    model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()
