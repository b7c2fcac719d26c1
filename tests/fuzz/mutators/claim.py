"""Edits small JSON files of an unfinished run: its owner, and what its shares were asked for."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.text import edit_text
from fuzz.mutators.values import edit_json_file, load


def mutate(path: Path, random: Random) -> None:
    """Change anything in the file, or its text."""
    if isinstance(load(path), dict) and random.random() < 0.7:
        edit_json_file(path, random)
    else:
        path.write_bytes(edit_text(path.read_bytes(), random))
