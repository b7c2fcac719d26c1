"""Faults that one family's tensors alone can have. The bundles hold the released weights as they
are: such a fault is no matter of precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from faults import planting
from faults.fault import Fault
from faults.small_model import CHANNELS
from faults.weight_faults import config_changed, mtp, swapped
from runtime.checkpoints import GLM4_MOE

GLM, INDEXED, SHARING = "glm4_moe", "deepseek_v32", "glm_moe_dsa"
LAYER = f"model.layers.{GLM4_MOE['num_hidden_layers']}"
ATTENTION = f"{LAYER}.self_attn"
HEAD = f"{LAYER}.shared_head.head.weight"


def biases_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", "_proj.bias")))


def indexer_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", ".indexer.")))


def copy_without_scale(bundle: Path) -> None:
    planting.write(bundle / "mtp", {f"{HEAD}_scale": None})


def copy_in_bf16(bundle: Path) -> None:
    """The main model's head itself, where config.json promises a copy in fp8."""
    head = planting.read(bundle / "main", "lm_head.weight")
    planting.write(bundle / "mtp", {HEAD: head, f"{HEAD}_scale": None})


def rows_reversed(codes: torch.Tensor) -> torch.Tensor:
    """Every token's row at another token."""
    return codes.view(torch.uint8).flip(0).view(codes.dtype)


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
    Fault("biases of keys and values swapped",
          partial(swapped, "mtp", f"{ATTENTION}.k_proj.bias", f"{ATTENTION}.v_proj.bias"),
          "weights", f"it holds {ATTENTION}.v_proj.bias", needs=GLM, source=True),
    Fault("whole heads rotated", partial(config_changed, {"partial_rotary_factor": 1.0}),
          "weights", "partial_rotary_factor is 1.0", needs=GLM, source=True),
    Fault("copy in another precision, of another head", mtp(HEAD, rows_reversed), "ledger",
          "of another checkpoint", needs=CHANNELS),
    Fault("copy in another precision than promised", copy_in_bf16, "files",
          "by quantization_config an engine expects fp8_channel", needs=CHANNELS),
    Fault("copy in another precision without its scale", copy_without_scale, "files",
          "is missing, though its weight is there", needs=CHANNELS),
    Fault("indexer left out", indexer_missing, "files",
          "indexer.wq_b.weight is missing", needs=INDEXED),
    Fault("weights of an indexer's heads left at zero",
          mtp(f"{ATTENTION}.indexer.weights_proj.weight", torch.zeros_like), "ledger",
          "weights_proj.weight is constant (zero)", needs=INDEXED),
    Fault("sharing of indexers dropped", partial(config_changed, {"indexer_types": None}), "files",
          "indexer.wq_b.weight is missing", needs=SHARING),
)  # fmt: skip
