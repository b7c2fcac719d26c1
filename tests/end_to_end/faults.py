"""Faults that exports were shipped with: each is planted into a copy of a good bundle, and verify
must name it. docs/faults.md is the table of fault and check.

A fault is planted the way a wrong exporter would have made it: with a manifest that agrees with the
wrong bytes. Only damage after the export leaves the manifest as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cases import edit_json


@dataclass(frozen=True)
class Fault:
    """A fault, and how verify must answer it.

    plant changes a copy of a bundle. needs: which bundle (a key of the test's BUNDLES).
    caught_by: the check that fails. cause: words that a failed item of that check must say.
    source: whether it takes --source to see it. seen_as: where it was met in the field.
    """

    name: str
    plant: Callable[[Path], None]
    caught_by: str
    cause: str
    needs: str = "fp8"
    source: bool = False
    seen_as: str = ""


def manifest_missing(bundle: Path) -> None:
    (bundle / "mtp_export.json").unlink()


def manifest_of_another_version(bundle: Path) -> None:
    edit_json(bundle / "mtp_export.json", lambda manifest: manifest.update(format_version=99))


FAULTS: tuple[Fault, ...] = (
    Fault("manifest missing", manifest_missing, "files", "no manifest"),
    Fault("manifest of another version", manifest_of_another_version, "files", "version 99"),
)
