"""Models by config.json's model_type. A new one is one file and one line here."""

from __future__ import annotations

from mtp_runtime.models.deepseek_v3 import DeepseekV3

MODELS: dict[str, type[DeepseekV3]] = {"deepseek_v3": DeepseekV3}
