"""Edits any JSON file as text."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.text import edit_text


def mutate(path: Path, random: Random) -> None:
    """Apply one or two edits."""
    raw = path.read_bytes()
    for _ in range(random.choice((1, 1, 2))):
        raw = edit_text(raw, random)
    path.write_bytes(raw)
