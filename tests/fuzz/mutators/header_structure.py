"""Edits what a shard's header says: tensors, dtypes, shapes, offsets and metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutators.shard import read_shard, write_shard
from fuzz.mutators.values import NASTY, edit_value, nasty

Header = dict[str, Any]
_DTYPES = (
    *("BF16", "F16", "F32", "I32", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "BOOL"),
    *("F64", "I64", "U16", "bf16", "", None, 5, "C64"),
)
_SHAPES: tuple[Any, ...] = (
    *([], [0], [-1], [1], [2**62] * 250, [1] * 3000, [1] * 1_000_000, [0] * 1_000_000, [2**64], 3),
    *([True], [1.0], ["1"], None, {}, [[1]], [0, 2**63], [2**63, 0], [0, 2**62, 2**62]),
)
_NAMES = ("", "../x", "/x", "a/../b", "x", "a\nb", "\ud800", "__metadata__", "a" * 100_000, "é")


def mutate(path: Path, random: Random) -> None:
    """Apply one edit to the header, and to the data where the edit moves it."""
    header, data = read_shard(path)
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError):
        return
    if not isinstance(entries, dict):
        return
    data = random.choice(_EDITS)(entries, data, random)
    escaped = random.random() < 0.5
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=escaped)
    write_shard(path, text.encode("utf-8", "surrogatepass"), data)


def _tensors(header: Header) -> list[str]:
    """Return the names of the entries that still describe a tensor."""
    entries = ((n, e) for n, e in header.items() if n != "__metadata__" and isinstance(e, dict))
    return [name for name, entry in entries if "data_offsets" in entry]


def _two(header: Header, random: Random) -> tuple[Header, Header]:
    names = _tensors(header) or [""]
    return (header.get(random.choice(names), {}), header.get(random.choice(names), {}))


def _generic(header: Header, data: bytes, random: Random) -> bytes:
    edit_value(header, random)
    return data


def _swap_offsets(header: Header, data: bytes, random: Random) -> bytes:
    one, other = _two(header, random)
    one["data_offsets"], other["data_offsets"] = other.get("data_offsets"), one.get("data_offsets")
    return data


def _same_offsets(header: Header, data: bytes, random: Random) -> bytes:
    one, other = _two(header, random)
    one.update(other)
    return data


def _two_equals(header: Header, random: Random) -> tuple[Header, Header]:
    """Return two tensors of one dtype and shape, which may be the same one."""
    one, _ = _two(header, random)
    entries = [header[name] for name in _tensors(header)]
    keys = ("dtype", "shape")
    same = [other for other in entries if all(other.get(k) == one.get(k) for k in keys)]
    return one, random.choice(same or [one])


def _swap_equals(header: Header, data: bytes, random: Random) -> bytes:
    """Exchange two tensors of one size: the file stays whole, the tensors change."""
    one, other = _two_equals(header, random)
    one["data_offsets"], other["data_offsets"] = other.get("data_offsets"), one.get("data_offsets")
    return data


def _share(header: Header, data: bytes, random: Random) -> bytes:
    """Let two tensors of one size have the same bytes, and nobody those of the one."""
    one, other = _two_equals(header, random)
    one["data_offsets"] = deepcopy(other.get("data_offsets"))
    return data


def _shift(header: Header, data: bytes, random: Random) -> bytes:
    one, _ = _two(header, random)
    by = random.choice((-8, -1, 1, 8, 2**32, 2**63))
    offsets = one.get("data_offsets")
    if isinstance(offsets, list) and all(type(o) is int for o in offsets):
        moved = random.choice(((0,), (1,), (0, 1)))
        one["data_offsets"] = [o + by * (i in moved) for i, o in enumerate(offsets)]
    return data


def _another_dtype(header: Header, data: bytes, random: Random) -> bytes:
    _two(header, random)[0]["dtype"] = random.choice(_DTYPES)
    return data


def _another_shape(header: Header, data: bytes, random: Random) -> bytes:
    one, _ = _two(header, random)
    shape = one.get("shape")
    own = list(reversed(shape)) if isinstance(shape, list) else []
    with_ones = [*own, 1] if len(own) < 9 else own
    one["shape"] = random.choice((*_SHAPES, own, own, with_ones, own[:1], own[1:]))
    return data


def _another_name(header: Header, data: bytes, random: Random) -> bytes:
    names = _tensors(header)
    if names:
        name = random.choice(names)
        new = random.choice((*_NAMES, name + "x", name.replace("layers.", "layers.1", 1)))
        header[new] = header.pop(name)
    return data


def _drop(header: Header, data: bytes, random: Random) -> bytes:
    """Drop a tensor with its bytes: the file stays whole."""
    names = _tensors(header)
    try:
        name = random.choice(names)
        start, end = header.pop(name)["data_offsets"]
        for other in _tensors(header):
            offsets = header[other]["data_offsets"]
            if offsets[0] >= end:
                header[other]["data_offsets"] = [o - (end - start) for o in offsets]
        return data[:start] + data[end:]
    except (TypeError, ValueError, IndexError):
        return data


def _add(header: Header, data: bytes, random: Random) -> bytes:
    size = random.choice((0, 0, 4))
    name = random.choice((*_NAMES, "model.layers.0.extra.weight"))
    header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [len(data), len(data) + size]}
    return data + bytes(size)


def _reorder(header: Header, data: bytes, random: Random) -> bytes:
    """Lay the tensors out in another order: the file stays as good as it was."""
    names = _tensors(header)
    random.shuffle(names)
    pieces: list[bytes] = []
    try:
        for name in names:
            start, end = header[name]["data_offsets"]
            at = sum(map(len, pieces))
            pieces.append(data[start:end])
            header[name]["data_offsets"] = [at, at + end - start]
    except (TypeError, ValueError):
        return data
    return b"".join(pieces)


def _shuffle_keys(header: Header, data: bytes, random: Random) -> bytes:
    items = list(header.items())
    random.shuffle(items)
    header.clear()
    header.update(items)
    return data


def _metadata(header: Header, data: bytes, random: Random) -> bytes:
    values = (*NASTY, {"format": "pt", "x": "y"}, {"a": 1}, {"\ud800": "b"}, {"a": "\udfff"})
    header["__metadata__"] = deepcopy(random.choice(values))
    return data


def _field(header: Header, data: bytes, random: Random) -> bytes:
    one, _ = _two(header, random)
    one[random.choice(("dtype", "shape", "data_offsets", "extra"))] = nasty(random)
    return data


def _other_bytes(header: Header, data: bytes, random: Random) -> bytes:
    """Change bytes of tensors: nothing can tell, and the output must have them."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 20) if data else 0):
        changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


_EDITS: tuple[Callable[[Header, bytes, Random], bytes], ...] = (
    *(_generic, _swap_offsets, _same_offsets, _swap_equals, _shift, _another_dtype),
    *(_another_shape, _another_name, _drop, _add, _reorder, _shuffle_keys, _metadata, _field),
    *(_other_bytes, _swap_equals, _reorder, _share),
)
