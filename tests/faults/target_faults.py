"""Faults of a draft in the layout of every target, whose names are not the released ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from faults import planting
from faults.fault import Fault
from faults.small_model import TARGETS
from faults.weight_faults import Change, halves_swapped, swapped

PROJECTIONS = {"eagle": "fc"}  # where it is not eh_proj
TRANSPOSED = "paddlenlp"  # [in, out]


def _named(bundle: Path, module: str) -> str:
    """The only tensor of a module whose name ends so."""
    (name,) = (n for n in planting.names(bundle / "mtp") if f".{n}".endswith(f".{module}.weight"))
    return name


def module_changed(module: str, how: Change, bundle: Path) -> None:
    planting.change(bundle / "mtp", _named(bundle, module), how)


def concatenation_reversed(target: str, bundle: Path) -> None:
    def how(weight: torch.Tensor) -> torch.Tensor:
        return halves_swapped(weight.t()).t() if target == TRANSPOSED else halves_swapped(weight)

    module_changed(PROJECTIONS.get(target, "eh_proj"), how, bundle)


def output_missing(bundle: Path) -> None:
    planting.write(bundle / "mtp", dict.fromkeys(planting.names(bundle / "mtp", "o_proj")))


def norms_swapped(bundle: Path) -> None:
    swapped("mtp", _named(bundle, "enorm"), _named(bundle, "hnorm"), bundle)


TARGET_FAULTS = tuple(
    fault
    for target in TARGETS
    for fault in (
        Fault(f"{target}: output of attention missing", output_missing, "files",
              "is missing", needs=target),
        Fault(f"{target}: norm left at one", partial(module_changed, "hnorm", torch.ones_like),
              "ledger", "is constant (1)", needs=target),
        Fault(f"{target}: enorm and hnorm swapped", norms_swapped, "weights",
              "hnorm.weight", needs=target, source=True),
        Fault(f"{target}: concatenation reversed",
              partial(concatenation_reversed, target), "weights",
              "two halves of columns are swapped", needs=target, source=True),
    )
)  # fmt: skip
