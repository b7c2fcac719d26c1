"""Faults that one family's tensors alone can have. The bundles hold the released weights as they
are: such a fault is no matter of precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from faults import planting
from faults.fault import Fault
from faults.weight_faults import mtp, swapped
from runtime.checkpoints import GLM4_MOE

GLM, INDEXED = "glm4_moe", "deepseek_v32"
ATTENTION = f"model.layers.{GLM4_MOE['num_hidden_layers']}.self_attn"


def biases_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", "_proj.bias")))


def indexer_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", ".indexer.")))


def halves_interleaved(rows: torch.Tensor) -> torch.Tensor:
    """The rotary rows of every head, two halves, as interleaved pairs."""
    head = GLM4_MOE["head_dim"]
    size = int(head * GLM4_MOE["partial_rotary_factor"])
    by_head = rows.view(-1, head, *rows.shape[1:]).clone()
    order = torch.arange(size).view(2, -1).t().flatten()
    by_head[:, :size] = by_head[:, :size][:, order]
    return by_head.view(rows.shape)


FAMILY_FAULTS: tuple[Fault, ...] = (
    Fault("attention biases left out", biases_missing, "files",
          "q_proj.bias is missing", needs=GLM),
    Fault("attention bias left at zero", mtp(f"{ATTENTION}.k_proj.bias", torch.zeros_like),
          "ledger", "is constant (zero): it was never written", needs=GLM),
    Fault("norms of queries and keys swapped",
          partial(swapped, "mtp", f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight"),
          "weights", f"it holds {ATTENTION}.k_norm.weight", needs=GLM, source=True),
    Fault("rotary halves interleaved", mtp(f"{ATTENTION}.q_proj.weight", halves_interleaved),
          "weights", "its rotary rows are stored as two halves", needs=GLM, source=True),
    Fault("indexer left out", indexer_missing, "files",
          "indexer.wq_b.weight is missing", needs=INDEXED),
    Fault("weights of an indexer's heads left at zero",
          mtp(f"{ATTENTION}.indexer.weights_proj.weight", torch.zeros_like), "ledger",
          "weights_proj.weight is constant (zero)", needs=INDEXED),
)  # fmt: skip
