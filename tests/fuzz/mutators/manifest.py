"""Edits the manifest anywhere, and most of all its checksums, sizes and names."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.values import dump, edit_value, get, load, nasty, paths, put

_CLAIMS = ("xxh3_128", "size_bytes", "header_sha256", "sources", "operation", "tensors", "files")


def mutate(path: Path, random: Random) -> None:
    """Change a claim of the manifest, or anything in it."""
    manifest = load(path)
    claims = [found for found in paths(manifest) if found[-1] in _CLAIMS]
    if claims and random.random() < 0.5:
        place = random.choice(claims)
        put(manifest, place, nasty(random, get(manifest, place)))
    else:
        edit_value(manifest, random)
    dump(path, manifest)
