"""PaddleNLP: prefix deepseek_v3_mtp, linear weights and their scales stored [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_export.targets.base import (
    Config,
    Target,
    released_from_single_layer,
    single_layer_config,
)

_PREFIX = "deepseek_v3_mtp."
_RENAMED = {
    "embed_tokens.weight": f"{_PREFIX}embed_tokens.weight",
    "shared_head.norm.weight": f"{_PREFIX}norm.weight",
    "shared_head.head.weight": "lm_head.weight",
}
_MODEL_LEVEL = ("enorm", "hnorm", "eh_proj")


def _name(name: str, layer: int) -> str:
    rest = name.removeprefix(f"model.layers.{layer}.")
    if rest in _RENAMED:
        return _RENAMED[rest]
    if rest.split(".")[0] in _MODEL_LEVEL:
        return f"{_PREFIX}{rest}"
    return f"{_PREFIX}layers.0.{rest}"


def _config(config: Mapping[str, Any]) -> Config:
    return single_layer_config(config, _name)


PADDLENLP = Target(
    name="paddlenlp",
    engines=(),
    mtp_name=_name,
    mtp_config=_config,
    released_config=released_from_single_layer,
    needs_shared_weights=True,
    transposes=True,
)
