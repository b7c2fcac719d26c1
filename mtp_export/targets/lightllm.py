"""LightLLM (and SGLang before it read layer 61): the MTP layer as decoder layer 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_export.targets.base import (
    Config,
    Target,
    released_from_single_layer,
    single_layer_config,
)


def _name(name: str, layer: int) -> str:
    return name.replace(f"model.layers.{layer}.", "model.layers.0.", 1)


def _config(config: Mapping[str, Any]) -> Config:
    return single_layer_config(config, _name)


LIGHTLLM = Target(
    name="lightllm",
    engines=(),
    mtp_name=_name,
    mtp_config=_config,
    released_config=released_from_single_layer,
)
