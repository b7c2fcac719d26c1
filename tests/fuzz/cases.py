"""Defects that were found once, each as the smallest damage that shows it; campaigns run them all.

A new one is one line: a name that says the defect, and a Known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import edit_json


@dataclass(frozen=True)
class Known:
    """Damage to a subject's input, the command that reads it, and the exit that it must have."""

    command: str
    subject: str
    damage: Callable[[Path], object]
    exit: int


def field(name: str, value: Any, file: str = "source/config.json") -> Callable[[Path], object]:
    """Return the damage that sets a field of a JSON file."""
    return lambda folder: edit_json(folder / file, lambda content: content.update({name: value}))


def content(file: str, raw: bytes) -> Callable[[Path], object]:
    """Return the damage that replaces a file."""
    return lambda folder: (folder / file).write_bytes(raw)


CASES: dict[str, Known] = {}
