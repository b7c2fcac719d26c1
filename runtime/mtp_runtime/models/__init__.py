"""Models by config.json's model_type. A new one is one file and one line here.

Its tensors' names come from the family of the same model_type in mtp_export.families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtp_runtime.config import ModelConfig
from mtp_runtime.loading.weight_source import WeightSource
from mtp_runtime.models.builder import ModelBuilder
from mtp_runtime.models.deepseek_v3 import DeepseekV3Builder, DeepseekV3Config


@dataclass(frozen=True)
class ModelType:
    """A model that the runtime computes: its config, read from its family, and its builder, made
    of weights, family and config."""

    config: Callable[[Any], ModelConfig]
    builder: Callable[[WeightSource, Any, Any], ModelBuilder]


MODELS: dict[str, ModelType] = {
    "deepseek_v3": ModelType(DeepseekV3Config.of, DeepseekV3Builder),
}
