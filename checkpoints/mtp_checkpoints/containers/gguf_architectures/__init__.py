"""Architectures of GGUF files by the name that llama.cpp has for them. A new one is one file and
one line here."""

from __future__ import annotations

from mtp_checkpoints.containers.gguf_architectures.base import Architecture
from mtp_checkpoints.containers.gguf_architectures.deepseek2 import DEEPSEEK2
from mtp_checkpoints.containers.gguf_architectures.deepseek32 import DEEPSEEK32
from mtp_checkpoints.containers.gguf_architectures.glm4moe import GLM4MOE
from mtp_checkpoints.containers.gguf_architectures.glm_dsa import GLM_DSA
from mtp_checkpoints.containers.gguf_architectures.qwen3next import QWEN3NEXT
from mtp_checkpoints.containers.gguf_architectures.qwen35 import QWEN35
from mtp_checkpoints.containers.gguf_architectures.qwen35moe import QWEN35MOE

ARCHITECTURES: dict[str, Architecture] = {
    "deepseek2": DEEPSEEK2,
    "deepseek32": DEEPSEEK32,
    "glm4moe": GLM4MOE,
    "glm-dsa": GLM_DSA,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35MOE,
    "qwen3next": QWEN3NEXT,
}
# By model_type of config.json.
ARCHITECTURE_OF = {
    model_type: one for one in ARCHITECTURES.values() for model_type in one.model_types
}
