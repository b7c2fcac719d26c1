"""Random drafts of their own folders, for what needs no trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtp_checkpoints.families import family_of
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.eagle3 import Eagle3Family, eagle3_config
from mtp_checkpoints.families.parallel_heads import Body, HeadsLayout
from runtime.checkpoints import SMALL

TAPS = (1, 2)
DRAFT_VOCAB = 40
Tensors = dict[str, torch.Tensor]


def random_tensor(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random) * shape[-1] ** -0.5


def save_draft(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle3_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """Every tensor of a config but those that may be absent; draft ids are every other token."""
    random, tensors = torch.Generator().manual_seed(seed), Tensors()
    family = Eagle3Family.from_config(config)
    for spec in family.tensors.values():
        if spec.role is Role.VOCABULARY:
            continue
        if spec.role is Role.NORM:
            tensors[spec.name] = 1 + 0.1 * torch.randn(spec.shape, generator=random)
        elif not spec.optional:
            tensors[spec.name] = random_tensor(spec.shape, random)
    if family.draft_vocab < family.vocab:
        tokens = torch.randperm(family.vocab, generator=random)[: family.draft_vocab].sort().values
        tensors |= token_offsets(tokens, family.vocab)
    return tensors


def token_offsets(tokens: torch.Tensor, vocab: int) -> Tensors:
    """d2t and t2d of ascending tokens [Vd] out of a vocabulary."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": mask}


def write_eagle3(
    folder: Path,
    target: dict[str, Any] = SMALL,
    taps: tuple[int, ...] = TAPS,
    draft_vocab: int = DRAFT_VOCAB,
    **changes: object,
) -> Path:
    """A random EAGLE-3 draft for the target of a config."""
    config = eagle3_config(target, taps, draft_vocab, dtype="float32") | changes
    return save_draft(folder, config, eagle3_tensors(config))


def ffn_layout(**changes: Any) -> HeadsLayout:
    fields = {"heads": 3, "body": Body.FFN, "hidden": SMALL["hidden_size"]}
    return HeadsLayout(**({**fields, "vocab": SMALL["vocab_size"]} | changes))


def heads_tensors(layout: HeadsLayout, seed: int = 0) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {name: random_tensor(shape, random) for name, shape in layout.shapes().items()}


def write_heads(folder: Path, layout: HeadsLayout) -> Path:
    """Random heads of residual blocks."""
    return save_draft(folder, layout.config("float32"), heads_tensors(layout))


def write_layer_heads(folder: Path, target: dict[str, Any] = SMALL, heads: int = 2) -> Path:
    """Random heads like the target's last layer."""
    last = f"model.layers.{target['num_hidden_layers'] - 1}."
    random, tensors = torch.Generator().manual_seed(5), Tensors()
    for head in range(heads):
        for spec in family_of(target).tensors.values():
            if spec.name.startswith(last):
                name = f"extra_heads.{head}.{spec.name.removeprefix(last)}"
                norm = spec.role is Role.NORM
                tensors[name] = (
                    torch.ones(spec.shape) if norm else random_tensor(spec.shape, random)
                )
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    layout = HeadsLayout(heads, Body.LAYER, hidden, vocab, blocks=0, biases=False)
    return save_draft(folder, layout.config("float32"), tensors)
