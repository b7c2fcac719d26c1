"""JSON parser that refuses what is no JSON, or no text, though Python's json takes it."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 64  # the deepest files of real checkpoints, tokenizers, have about 10
_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class DuplicateKeyError(ValueError):
    """A duplicate key in one object; its argument is the key."""


def parse(raw: bytes) -> Any:
    """Return the value of UTF-8 JSON.

    Raises ValueError for anything else: also for duplicate keys, of which json takes the last, for
    NaN and infinities, for halves of surrogate pairs, and for deep nesting.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if isinstance(value, list | dict):
        _check_depth(value)
    if _ESCAPED_SURROGATE.search(raw):
        _check_text(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return result


def _refuse_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        _refuse_number(digits[:50])
    return value


def _check_depth(value: Any) -> None:
    """Refuse a value that recursive code, as of json and repr, may not get through (ValueError)."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, list | dict)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_text(value: Any) -> None:
    """Refuse strings that UTF-8 cannot hold (ValueError)."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair in a string") from None
