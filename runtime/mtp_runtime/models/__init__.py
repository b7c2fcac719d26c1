"""Models by config.json's model_type. A new one is one file and one line here.

Its tensors' names come from the family of the same model_type in mtp_checkpoints.families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mtp_checkpoints.families.deepseek_v3 import DeepseekV3Family
from mtp_checkpoints.families.deepseek_v32 import DeepseekV32Family
from mtp_checkpoints.families.glm4_moe import Glm4MoeFamily
from mtp_checkpoints.families.glm4_moe_lite import Glm4MoeLiteFamily
from mtp_checkpoints.families.glm_moe_dsa import GlmMoeDsaFamily
from mtp_checkpoints.families.modules import DecoderFamily
from mtp_runtime.config import ModelConfig
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.builder import ModelBuilder
from mtp_runtime.models.deepseek_v3 import DeepseekV3Builder, DeepseekV3Config
from mtp_runtime.models.deepseek_v32 import DeepseekV32Builder, DeepseekV32Config
from mtp_runtime.models.glm4_moe import Glm4MoeBuilder, Glm4MoeConfig

Family = TypeVar("Family", bound=DecoderFamily)
Config = TypeVar("Config", bound=ModelConfig)


@dataclass(frozen=True)
class ModelType(Generic[Family, Config]):
    """A model that the runtime computes: its config, read from its family, and its builder, made
    of weights, family and config.

    The types are named in MODELS, so that a builder of another family or config is a type error.
    """

    config: Callable[[Family], Config]
    builder: Callable[[WeightSource, Family, Config], ModelBuilder]


MODELS: dict[str, ModelType[Any, Any]] = {
    "deepseek_v3": ModelType[DeepseekV3Family, DeepseekV3Config](
        DeepseekV3Config.of, DeepseekV3Builder
    ),
    "glm4_moe": ModelType[Glm4MoeFamily, Glm4MoeConfig](Glm4MoeConfig.of, Glm4MoeBuilder),
    "glm4_moe_lite": ModelType[Glm4MoeLiteFamily, DeepseekV3Config](
        DeepseekV3Config.of, DeepseekV3Builder
    ),
    "deepseek_v32": ModelType[DeepseekV32Family, DeepseekV32Config](
        DeepseekV32Config.of, DeepseekV32Builder
    ),
    "glm_moe_dsa": ModelType[GlmMoeDsaFamily, DeepseekV32Config](
        DeepseekV32Config.of, DeepseekV32Builder
    ),
}
