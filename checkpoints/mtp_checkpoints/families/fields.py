"""Typed reading of config.json: whoever reads a field says its type and bounds, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_checkpoints.errors import InvalidInputError

MAX_WHOLE = 10_000_000  # far above the sizes and counts of any model
MAX_POSITIONS = 1 << 40
_MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of config.json, or of an object in it, whose name and a dot are the prefix.

    An absent field has the default that its reader gives, and is refused where there is none. A
    null is a value like any other, and of a wrong type. Every reader raises InvalidInputError for
    a value that is not usable.
    """

    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, key: str) -> bool:
        """Return True for a field that is there and not null."""
        return self.values.get(key) is not None

    def without_nulls(self) -> Fields:
        """Return the fields with every null taken for absent."""
        kept = {key: value for key, value in self.values.items() if value is not None}
        return Fields(kept, self.prefix)

    def section(self, key: str) -> Fields:
        """Return the fields of an object, without its nulls; none where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.unusable(key, "an object")
        return Fields(value or {}, f"{self.prefix}{key}.").without_nulls()

    def whole(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_WHOLE
    ) -> int:
        """Return a whole number within bounds."""
        value = self.values.get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.unusable(key, f"a whole number from {minimum} to {maximum}")
        return value

    def number(
        self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float
    ) -> float:
        """Return a number within bounds."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            raise self.unusable(key, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.unusable(key, "true or false")
        return value

    def word(self, key: str, default: str | None = None, *, choices: Collection[str] = ()) -> str:
        """Return a text; with choices, one of them."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or (choices and value not in choices):
            raise self.unusable(key, " or ".join(choices) or "a text")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids that a field gives as one or a list; none where it is null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in ids):
            raise self.unusable(key, "a token id, or a list of them")
        return tuple(ids)

    def unusable(self, key: str, expected: str) -> InvalidInputError:
        """Return the error of a field whose value is not as expected."""
        there = key in self.values
        return InvalidInputError(
            f"config.json has no usable {self.prefix}{key}",
            expected=expected,
            found=repr(self.values[key])[:100] if there else "no such field",
            todo="Correct config.json, or get it again from the checkpoint's source",
        )
