"""Model families by config.json's model_type. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtp_export.errors import UnsupportedError
from mtp_export.families.base import ModelFamily
from mtp_export.families.deepseek_v3 import DeepseekV3Family

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelFamily]] = {
    "deepseek_v3": DeepseekV3Family.from_config,
}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a config.json, whatever it says of quantization.

    Raises UnsupportedError for a model_type without a family, and what the family raises.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(
            "This model type is not supported",
            expected=f"model_type {' or '.join(sorted(FAMILIES))} in config.json",
            found=repr(model_type)[:100],
            todo="Other models need a family of their own; CONTRIBUTING.md says how to add one",
        )
    return FAMILIES[model_type](config)
