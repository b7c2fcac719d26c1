"""Faults of drafts in folders of their own, planted into ones that are fitted to the fixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from faults.fitted_drafts import TAPS, change_config

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class DraftFault:
    """A fault of a method's draft, the check that must name it, and words that it must say."""

    name: str
    method: str
    plant: Callable[[Path], None]
    caught_by: str
    cause: str


def changed(folder: Path, change: Callable[[Tensors], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def taps_off_by_one(folder: Path) -> None:
    ids = [tap + 1 for tap in TAPS]
    key = "eagle_aux_hidden_state_layer_ids"
    change_config(folder, **{key: ids, "eagle_config": {key: ids}})


def taps_differ(folder: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    change_config(folder, eagle_config={key: [tap + 1 for tap in TAPS]})


def d2t_shifted(folder: Path) -> None:
    """And the mask with it, as an exporter would write it."""

    def shift(tensors: Tensors) -> None:
        tensors["d2t"] += 1
        tensors["t2d"] = tensors["t2d"].roll(1)

    changed(folder, shift)


def d2t_alone_shifted(folder: Path) -> None:
    changed(folder, lambda tensors: tensors["d2t"].add_(1))


def d2t_of_tokens(folder: Path) -> None:
    """The tokens themselves in place of their offsets."""
    changed(folder, lambda tensors: tensors["d2t"].add_(torch.arange(len(tensors["d2t"]))))


def heads_swapped(folder: Path) -> None:
    def swap(tensors: Tensors) -> None:
        one, other = (f"lm_heads.{head}.weight" for head in range(2))
        tensors[one], tensors[other] = tensors[other], tensors[one]

    changed(folder, swap)


def biases_dropped(folder: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".bias")]:
            del tensors[name]

    changed(folder, drop)


def unknown_tensor(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.update(token_map=torch.arange(3)))


DRAFT_FAULTS = [
    DraftFault("taps off by one", "eagle3", taps_off_by_one, "acceptance", "taps are off by one"),
    DraftFault("taps differ", "eagle3", taps_differ, "ledger", "as at the top level"),
    DraftFault("d2t shifted", "eagle3", d2t_shifted, "acceptance", "d2t is shifted"),
    DraftFault("d2t alone", "eagle3", d2t_alone_shifted, "ledger", "name different tokens"),
    DraftFault("d2t of tokens", "eagle3", d2t_of_tokens, "ledger", "does not name ascending"),
    DraftFault(
        "heads swapped", "parallel_heads", heads_swapped, "acceptance", "heads 0 and 1 are swapped"
    ),
    DraftFault(
        "biases dropped", "parallel_heads", biases_dropped, "ledger", "biases of the heads are"
    ),
    DraftFault("unknown tensor", "parallel_heads", unknown_tensor, "ledger", "of no known layout"),
]
