"""Flips bits of a shard's header or of the eight bytes that tell its length."""

from __future__ import annotations

from pathlib import Path
from random import Random

_LENGTH_BYTES = 8


def mutate(path: Path, random: Random) -> None:
    """Flip one to four bits before the tensors' bytes."""
    raw = bytearray(path.read_bytes())
    head = min(len(raw), _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little"))
    for _ in range(random.randint(1, 4)):
        if head:
            in_length = random.random() < 0.1
            raw[random.randrange(min(head, _LENGTH_BYTES) if in_length else head)] ^= 1 << (
                random.randrange(8)
            )
    path.write_bytes(raw)
