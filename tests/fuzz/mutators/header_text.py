"""Edits a shard's header as text; its length is told rightly nearly always."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.shard import read_shard, write_shard
from fuzz.mutators.text import edit_text


def mutate(path: Path, random: Random) -> None:
    """Edit the header's text, pad it, or cut the file."""
    header, data = read_shard(path)
    match random.randrange(12):
        case 0:
            write_shard(path, header + b" " * random.randrange(1, 100), data)
        case 1:
            write_shard(path, header, data[: random.randrange(len(data) + 1)])
        case 2:
            write_shard(path, header, data + bytes(random.randrange(1, 100)))
        case 3:
            wrong = random.choice((0, 1, len(header) - 1, len(header) + 1, 2**31, 2**63, 2**64 - 1))
            path.write_bytes(max(0, wrong).to_bytes(8, "little") + header + data)
        case 4:
            path.write_bytes(path.read_bytes()[: random.randrange(12)])
        case _:
            write_shard(path, edit_text(header, random), data)
