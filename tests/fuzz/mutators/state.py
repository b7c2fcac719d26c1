"""Damages a file of tensors as torch saves it: cut, of other contents, or its structure changed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch

_ENDS_BYTES = 3000  # of the names and places at both ends of the archive
_OTHERS: tuple[object, ...] = (
    *(None, [], {}, 1, "x", torch.ones(2), {"parameters": {}}, {"tokens": torch.ones(3)}),
    *({"lengths": [1]}, {"losses": [["x"]], "parameters": {}, "optimizer": {}}, [torch.ones(1)]),
)


def mutate(path: Path, random: Random) -> None:
    """Cut the file, replace it, or change bytes near one of its ends."""
    raw = bytearray(path.read_bytes())
    match random.randrange(5):
        case 0:
            path.write_bytes(raw[: random.randrange(len(raw) + 1)])
        case 1:
            torch.save(random.choice(_OTHERS), path)
        case 2:
            torch.save(_without_one(path, random), path)
        case _:
            for _ in range(random.randint(1, 4) if raw else 0):
                place = random.randrange(min(len(raw), _ENDS_BYTES))
                raw[place if random.random() < 0.5 else -1 - place] ^= 1 << random.randrange(8)
            path.write_bytes(raw)


def _without_one(path: Path, random: Random) -> object:
    """Return the content without one of its entries, or with another one's value in its place."""
    try:
        content = torch.load(path, weights_only=True)
    except Exception:  # an earlier edit left nothing that torch reads
        return None
    if isinstance(content, dict) and content:
        name = random.choice(list(content))
        if random.random() < 0.5:
            del content[name]
        else:
            content[name] = content[random.choice(list(content))]
    return content
