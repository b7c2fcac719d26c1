"""Drafts that are fitted to a model's own texts by least squares: good enough to tell a damaged one
from an intact one, and made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.eagle3 import Eagle3Family, eagle3_config
from mtp_checkpoints.families.parallel_heads import Body, HeadsLayout
from mtp_export.verify.evidence.corpus import Corpus
from mtp_runtime.teacher_forcing import model_states
from runtime.drafts import save_draft, token_offsets

HEADS = 2
_RIDGE = 1e-3


def fitted(inputs: torch.Tensor, goals: torch.Tensor) -> torch.Tensor:
    """The matrix [out, in] that maps inputs [n, in] to goals [n, out] best."""
    inputs, goals = inputs.double(), goals.double()
    square = inputs.T @ inputs
    ridge = _RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    return torch.linalg.solve(square + ridge, inputs.T @ goals).T.float()


def taps_of(layers: int) -> tuple[int, int, int]:
    """An early layer, one in the middle and a late one."""
    return min(2, layers // 4), layers // 2, layers - max(1, layers // 20)


TAPS = taps_of(61)  # of deepseek-v3-tiny


def write_fitted_eagle3(folder: Path, corpus: Corpus) -> None:
    """A draft without attention: fc maps the taps to the target's state one row further on."""
    rows, taps = corpus.everywhere.rows, taps_of(corpus.model.config.layers)
    states = model_states(corpus.model.tapped(taps), corpus.texts)
    assert states.taps is not None
    main = json.loads((folder.parent / "main/config.json").read_text())
    vocab = main["vocab_size"]
    tokens = torch.cat([corpus.choices.unique(), torch.arange(8)]).unique()
    config = eagle3_config(main, taps, len(tokens), "float32")
    tensors = token_offsets(tokens, vocab)
    for spec in Eagle3Family.from_config(config).tensors.values():
        if spec.role is not Role.VOCABULARY and not spec.optional:
            fill = torch.ones if spec.role is Role.NORM else torch.zeros
            tensors[spec.name] = fill(spec.shape)
    tensors["fc.weight"] = fitted(states.taps[rows], states.before[rows + 1])
    tensors["norm.weight"] = corpus.model.head.norm.weight.clone()
    tensors["lm_head.weight"] = corpus.model.head.linear.matrix(torch.float32).t()[tokens]
    save_draft(folder, config, tensors)


def write_fitted_heads(folder: Path, corpus: Corpus) -> None:
    """Medusa heads: head i maps the target's state to its logits i + 1 rows further on."""
    rows, after = corpus.everywhere.rows, corpus.states[1]
    head = corpus.model.head.linear.matrix(torch.float32).t()
    vocab, hidden = head.shape
    layout = HeadsLayout(HEADS, Body.FFN, hidden, vocab, own_projections=True)
    tensors = {name: torch.zeros(shape) for name, shape in layout.shapes().items()}
    for index in range(HEADS):
        inside = rows[rows + 1 + index < len(after)]
        tensors[f"lm_heads.{index}.weight"] = head @ fitted(
            after[inside], after[inside + 1 + index]
        )
    save_draft(folder, layout.config("float32"), tensors)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
