"""llama.cpp: GGUF files of the main model and of the MTP module, which its server loads as a draft
model beside it.

Outside the files every tensor has its released name; those of the files are in
mtp_checkpoints.containers.gguf_architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF
from mtp_checkpoints.containers.gguf_file import NAME
from mtp_checkpoints.formats import GGUF
from mtp_checkpoints.layouts.base import Config, Deployment, Engine, Target
from mtp_checkpoints.quantization.native import with_quantization


def _name(name: str, layer: int) -> str:
    return name


def _config(config: Mapping[str, Any]) -> Config:
    return with_quantization(config, None)  # the files say how each tensor is stored


def _released(config: Mapping[str, Any], main_layers: int) -> Config:
    return dict(config)


def _launch(bundle: Deployment) -> str:
    """Serve both files, or the one that holds both; llama.cpp divides a model among devices by
    itself."""
    draft = f" -md {bundle.file('mtp')}" if "mtp" in bundle.files else ""
    return (
        f"llama-server -m {bundle.file('main')}{draft} --spec-type draft-mtp"
        f" --spec-draft-n-max {bundle.draft_tokens}"
    )


LLAMA_CPP = Target(
    name="llama.cpp",
    engines=(
        Engine(
            "llama.cpp",
            frozenset({GGUF}),
            launch=_launch,
            probe="command -v llama-server",
            title="llama.cpp",
        ),
    ),
    mtp_name=_name,
    mtp_config=_config,
    released_config=_released,
    model_types=frozenset(ARCHITECTURE_OF),
    mtp_methods=frozenset({GGUF}),
    needs_shared_weights=True,
    dequantizes=True,
    container=NAME,
)
