"""transformers' models of the checkpoints that the tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers


def oracle(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model; it finds MTP layers by the layer numbers of the releases alone."""
    config = json.loads((path / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    patterns = [rf"model\.layers\.{config['num_hidden_layers']}.*"]
    for owner in kind.__mro__:
        if "_keys_to_ignore_on_load_unexpected" in vars(owner):
            known = vars(owner)["_keys_to_ignore_on_load_unexpected"] or []
            others = [pattern for pattern in known if "layers" not in pattern]
            monkeypatch.setattr(owner, "_keys_to_ignore_on_load_unexpected", [*others, *patterns])
    model, info = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()
