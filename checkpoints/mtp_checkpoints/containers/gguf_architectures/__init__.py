"""Architectures of GGUF files by the name that llama.cpp has for them. A new one is one file and
one line here."""

from __future__ import annotations

from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_architectures.deepseek2 import DEEPSEEK2
from mtp_checkpoints.containers.gguf_architectures.deepseek32 import DEEPSEEK32
from mtp_checkpoints.containers.gguf_architectures.glm4moe import GLM4MOE
from mtp_checkpoints.containers.gguf_architectures.glm_dsa import GLM_DSA

ARCHITECTURES: dict[str, Architecture] = {
    "deepseek2": DEEPSEEK2,
    "deepseek32": DEEPSEEK32,
    "glm4moe": GLM4MOE,
    "glm-dsa": GLM_DSA,
}
# By model_type of config.json.
ARCHITECTURE_OF = {
    model_type: one for one in ARCHITECTURES.values() for model_type in one.model_types
}
