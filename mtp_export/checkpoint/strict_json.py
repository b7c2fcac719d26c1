"""JSON parser that refuses duplicate keys, of which json silently takes the last."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """A duplicate key in one object; its argument is the key."""


def parse(raw: bytes) -> Any:
    """Return the value of UTF-8 JSON (ValueError, or RecursionError for too deep nesting)."""
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DuplicateKeyError(key)
        result[key] = value
    return result
