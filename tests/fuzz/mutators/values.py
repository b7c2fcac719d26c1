"""Values that a JSON file should not hold at some place, and edits of a JSON value by its paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    *(None, True, False, "", "0", "1", "x", "null", [], {}, [[]], [None], {"a": None}, {"": {}}),
    *(-1, 0, 1, 2, 3, 7, 1000, 1_000_000, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-320, 1e-30, 1e30, 1e308, float("nan"), float("inf")),
    *(
        "NaN",
        "../../outside",
        "/etc/hostname",
        "a/../b",
        "a\0b",
        "a\nb",
        "\ud800",
        "\u202ex",
        ":smile:",
    ),
    *("x" * 100_000, "bfloat16", "float8_e4m3fn", "deepseek_v3", ["x"] * 1000, [0] * 100_000),
)
Keys = tuple[Any, ...]


def load(path: Path) -> Any:
    """Return the JSON of a file; None where an earlier edit left none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError):
        return None


def dump(path: Path, value: Any) -> None:
    """Write JSON; NaN and lone surrogates as they are."""
    path.write_text(json.dumps(value))


def paths(value: Any, prefix: Keys = ()) -> Iterator[Keys]:
    """Yield the paths of all values inside a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:50])
    for key, inner in items:
        yield (*prefix, key)
        yield from paths(inner, (*prefix, key))


def put(value: Any, path: Keys, new: Any) -> None:
    """Replace the value at a path."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def get(value: Any, path: Keys) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


def nasty(random: Random, old: Any = None) -> Any:
    """Return a nasty value, or one close to the old one."""
    if random.random() < 0.7 or isinstance(old, bool):
        return deepcopy(random.choice(NASTY))
    if isinstance(old, int):
        return random.choice((old + 1, old - 1, -old, old * 2, float(old), str(old), old * 10**6))
    if isinstance(old, float):
        return random.choice((old * 2, -old, old + 0.5, str(old)))
    if isinstance(old, str) and old:
        cut = random.randrange(len(old))
        other = old[:cut] + "0" + old[cut + 1 :]
        return random.choice((old[:cut], other, old.upper(), old + "x", [old]))
    return random.choice(([deepcopy(old)], {"a": deepcopy(old)}, None))


def edit_value(value: Any, random: Random) -> None:
    """Change, drop, move or add one entry anywhere in a JSON value."""
    found = list(paths(value))
    if not found:
        return
    path = random.choice(found)
    holder = get(value, path[:-1])
    match random.randrange(10):
        case 0:
            del holder[path[-1]]
        case 1:
            put(value, path, deepcopy(get(value, random.choice(found))))
        case 2 if isinstance(holder, dict):
            holder[random.choice(("x", "", "../x", "\ud800", "a" * 5000))] = nasty(random)
        case 3 if isinstance(holder, dict):
            holder[str(path[-1]) + random.choice(("x", " ", "\n", "/.."))] = holder.pop(path[-1])
        case _:
            put(value, path, nasty(random, get(value, path)))


def edit_json_file(path: Path, random: Random) -> None:
    """Apply one such edit to a JSON file."""
    value = load(path)
    edit_value(value, random)
    dump(path, value)
