"""Planted faults: a change of a bundle, and the answer that verify must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A fault of a bundle, and the check that must name it.

    plant: changes a copy of a bundle. caught_by: the check that fails. cause: words that a failed
    item of that check must say. needs: the good bundle to change (see matrix.Bundles). source: the
    fault shows only with --source. seen_as: issues of engines and tools where it occurred.
    """

    name: str
    plant: Callable[[Path], None]
    caught_by: str
    cause: str
    needs: str = "fp8"
    source: bool = False
    seen_as: str = ""
