"""Edits the index: which file holds which tensor."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzz.mutators.values import dump, edit_json_file, load, nasty

_FILES = (
    *("../x.safetensors", "/x.safetensors", "x.safetensors", "config.json", ".safetensors", "."),
    *("a\\b.safetensors", "a\0.safetensors", "x" * 300 + ".safetensors", "\ud800.safetensors"),
    *("model-00001-of-00003.safetensors", "MODEL-00001-OF-00003.SAFETENSORS"),
)


def mutate(path: Path, random: Random) -> None:
    """Change, move, drop or add an entry, or anything else in the file."""
    index = load(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or random.random() < 0.3:
        edit_json_file(path, random)
        return
    name = random.choice(list(places))
    match random.randrange(6):
        case 0:
            places[name] = random.choice((nasty(random), *_FILES))
        case 1:
            places[name] = random.choice(list(places.values()))
        case 2:
            del places[name]
        case 3:
            places[random.choice(("x", "", "../x", "\ud800", name + "x"))] = places[name]
        case 4:
            chosen, new = places[name], random.choice(_FILES)
            index["weight_map"] = {n: new if f == chosen else f for n, f in places.items()}
        case _:
            index["metadata"] = nasty(random)
    dump(path, index)
