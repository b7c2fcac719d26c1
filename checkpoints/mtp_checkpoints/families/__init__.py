"""Model families by config.json's model_type. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families.base import ModelFamily
from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family
from mtp_checkpoints.families.deepseek_v32 import DeepseekV32Family
from mtp_checkpoints.families.glm4_moe import Glm4MoeFamily
from mtp_checkpoints.families.glm4_moe_lite import Glm4MoeLiteFamily
from mtp_checkpoints.families.glm_moe_dsa import GlmMoeDsaFamily
from mtp_checkpoints.families.without_mtp import refuse_without_mtp

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelFamily]] = {
    "deepseek_v3": DeepseekV3Family.from_config,
    "glm4_moe": Glm4MoeFamily.from_config,
    "glm4_moe_lite": Glm4MoeLiteFamily.from_config,
    "deepseek_v32": DeepseekV32Family.from_config,
    "glm_moe_dsa": GlmMoeDsaFamily.from_config,
}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a config.json, whatever it says of quantization.

    Raises UnsupportedError for a model_type without a family, and what the family raises.
    """
    model_type = config.get("model_type")
    refuse_without_mtp(str(model_type))
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedError(
            "This model type is not supported",
            expected=f"model_type {' or '.join(sorted(FAMILIES))} in config.json",
            found=repr(model_type)[:100],
            todo="Other models need a family of their own; CONTRIBUTING.md says how to add one",
        )
    return FAMILIES[model_type](config)
