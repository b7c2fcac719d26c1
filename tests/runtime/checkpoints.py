"""Small random checkpoints in the released layout, for what needs no trained weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtp_checkpoints.families import FAMILIES, family_of, parts
from mtp_checkpoints.families.base import FLOATS, Role
from mtp_checkpoints.families.examples import Example
from mtp_runtime.models.layer_types import why_not_computed

EXAMPLES: dict[str, Example] = {
    name: examples[name]
    for name, spec in FAMILIES.items()
    if name in (examples := vars(sys.modules[spec.__module__]).get("EXAMPLES", {}))
}
# A small config of every family, with at least one MTP layer; contract tests go by it.
SMALL_CONFIGS = {name: example.config for name, example in EXAMPLES.items()}
SMALL, GLM4_MOE = SMALL_CONFIGS["deepseek_v3"], SMALL_CONFIGS["glm4_moe"]
# Those that the runtime computes; the others are exported, quantized and judged by their tensors.
COMPUTED = tuple(
    name for name, config in SMALL_CONFIGS.items() if not why_not_computed(family_of(config))
)
# Families whose attention the kernels divide among ranks: without states of requests, sliding
# windows and gates of heads.
UNDIVIDED = parts.GatedDeltaNet | parts.Mamba2 | parts.SlidingGqa | parts.HeadGatedGqa
DIVIDED = tuple(
    name
    for name in COMPUTED
    if not any(isinstance(part, UNDIVIDED) for part in family_of(SMALL_CONFIGS[name]).parts)
)
# Families whose modules trainings take: one module, without a sliding window.
TRAINED = tuple(
    name
    for name in COMPUTED
    if len(modules := family_of(SMALL_CONFIGS[name]).mtp) == 1
    and getattr(modules[0].layer.attention, "window", None) is None
)
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config's decoder."""
    return config.get("text_config") or config


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with changes of its decoder's fields."""
    if "text_config" not in config:
        return config | changes
    return config | {"text_config": config["text_config"] | changes}


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    names: Collection[str] = (),
) -> Path:
    """Random float32 weights for every tensor of the config, in one file; of a vision tower one.

    names: some tensors', which tell what the config does not.
    """
    config = SMALL if config is None else config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    family = family_of(config, names)
    for spec in family.tensors.values():
        if spec.optional:
            continue
        values = torch.randn(spec.shape, generator=generator)
        if spec.dtypes[0] not in FLOATS:
            tensors[spec.name] = torch.randint(2, spec.shape, generator=generator)
        elif spec.role is Role.NORM:
            of_stream = not spec.name.endswith("linear_attn.norm.weight")
            mean = 1 - family.facts.norm_offset if of_stream else 1
            tensors[spec.name] = mean + 0.1 * values
        elif len(spec.shape) == 1:
            tensors[spec.name] = 0.1 * values
        else:
            tensors[spec.name] = values * spec.shape[-1] ** -0.5
    for prefix in family.carried:
        tensors[f"{prefix}pos_embed.weight"] = torch.randn([4, 32], generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
