"""Edits of JSON as text, most of which leave no JSON."""

from __future__ import annotations

import re
from random import Random

_TOKENS: tuple[bytes, ...] = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"-", b".", b"0", b"e9"),
    *(b" ", b"\n", b"\t", b"\0", b"\x7f", b"\xff", b"\xc3", b"\xe2\x80\xae", b"\xef\xbb\xbf"),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b'"\\ud800"', b"\\u0000"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"//", b"'", b" " * 10_000),
)
_NUMBERS = (
    b"-1",
    b"0",
    b"1.0",
    b"1e3",
    b"00",
    b"18446744073709551616",
    b"-0",
    b"1e999",
    b"9" * 5000,
)


def edit_text(raw: bytes, random: Random) -> bytes:
    """Return text after one edit."""
    start = random.randrange(len(raw) + 1)
    end = min(len(raw), start + int(2 ** random.uniform(0, 8)))
    match random.randrange(7):
        case 0 | 1:
            return raw[:start] + random.choice(_TOKENS) + raw[start:]
        case 2:
            return raw[:start] + raw[end:]
        case 3:
            return raw[:end] + raw[start:end] + raw[end:]
        case 4:
            return raw[:start]
        case 5:
            return _with_another_number(raw, random)
        case _:
            return raw[:start] + bytes([random.randrange(256)]) + raw[start + 1 :]


def _with_another_number(raw: bytes, random: Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+", raw))
    if not numbers:
        return raw
    chosen = random.choice(numbers)
    return raw[: chosen.start()] + random.choice(_NUMBERS) + raw[chosen.end() :]
