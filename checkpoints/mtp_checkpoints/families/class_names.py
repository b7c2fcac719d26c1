"""Classes that a config.json names for engines: a draft's, or another model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_DRAFT_CLASSES = ("NextN", "MTP", "MTPModel")  # ends of names in vLLM and SGLang
_OTHERS = ("lla", "mis", "mix", "qwe", "phi", "gem", "gpt", "fal")  # Llama, Mistral, Qwen2 and such
_SHARED = ("dee",)  # DeepSeek's class, which models of others have as it is


def draft_class(config: Mapping[str, Any]) -> str | None:
    """Return the first architecture of a config.json, where it is an engine's class of MTP drafts;
    None where it is not."""
    first = _first_class(config)
    return first if first is not None and first.endswith(_DRAFT_CLASSES) else None


def foreign_class(config: Mapping[str, Any], types: Iterable[str]) -> str | None:
    """Return the first architecture of a config.json, where it is the class of a model whose name
    begins otherwise than its model_type does; None where it is not, or is of no known model, and
    where code of its own comes with the checkpoint. types: known model_types."""
    first = _first_class(config)
    if first is None or config.get("auto_map"):
        return None
    own, others = _beginning(str(config.get("model_type"))), {*map(_beginning, types), *_OTHERS}
    is_known = _beginning(first) in others - {own} and _beginning(first) not in _SHARED
    return first if is_known else None


def _first_class(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else None


def _beginning(name: str) -> str:
    return name.replace("_", "").lower()[:3]
