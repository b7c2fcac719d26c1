"""Edits the journal of an unfinished run: its lines, and what they record."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from fuzz.mutators.text import edit_text
from fuzz.mutators.values import edit_value, get, paths, put


def mutate(path: Path, random: Random) -> None:
    """Drop, repeat, move or cut lines, or change one."""
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return
    at = random.randrange(len(lines))
    match random.randrange(9):
        case 0:
            del lines[at]
        case 1:
            lines.insert(random.randrange(len(lines) + 1), lines[at])
        case 2:
            random.shuffle(lines)
        case 3:
            lines = [b"".join(lines)[: random.randrange(sum(map(len, lines)) + 1)]]
        case 4:
            lines[at] = edit_text(lines[at], random)
        case 5:
            lines = []
        case 6:
            lines[at] = _with_another_digit(lines[at], random)
        case _:
            lines[at] = _edited(lines[at], random)
    path.write_bytes(b"".join(lines))


def _edited(line: bytes, random: Random) -> bytes:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    edit_value(value, random)
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _with_another_digit(line: bytes, random: Random) -> bytes:
    """Change a digit of a text: the line stays whole, and a checksum becomes a wrong one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = [path for path in paths(value) if isinstance(get(value, path), str)]
    if texts:
        place = random.choice(texts)
        old = get(value, place)
        cut = random.randrange(len(old)) if old else 0
        put(value, place, old[:cut] + random.choice("0123456789abcdef") + old[cut + 1 :])
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
