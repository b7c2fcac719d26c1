"""What a planted fault is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A fault, and how verify must answer it.

    plant changes a copy of a bundle. caught_by: the check that fails. cause: words that a failed
    item of that check must say. needs: which bundle (a key of BUNDLES in test_verify_faults).
    source: whether it takes --source to see it. seen_as: where it was met in the field.
    """

    name: str
    plant: Callable[[Path], None]
    caught_by: str
    cause: str
    needs: str = "fp8"
    source: bool = False
    seen_as: str = ""
