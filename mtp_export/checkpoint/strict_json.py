"""JSON in which no key stands twice: a second one would silently win."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKeyError(ValueError):
    """A key stands twice in one object; the key is its argument."""


def parse(raw: bytes) -> Any:
    """The value of UTF-8 JSON (ValueError, or RecursionError for absurd nesting)."""
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DuplicateKeyError(key)
        result[key] = value
    return result
