"""Typed reading of config.json: whoever reads a field says its type and bounds, once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtp_checkpoints.errors import InvalidInputError

MAX_WHOLE = 10_000_000  # far above the sizes and counts of any model
MAX_POSITIONS = 1 << 40
_MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of config.json, or of an object in it, whose name and a dot are the prefix; names are
    those that this config.json has for some, by their usual ones.

    An absent field has the default that its reader gives, and is refused where there is none. A
    null is a value like any other, and of a wrong type. Every reader raises InvalidInputError for
    a value that is not usable.
    """

    values: Mapping[str, Any]
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, **names: str) -> Fields:
        """Return the fields with other names for some, given by their usual ones."""
        return replace(self, names={**self.names, **names})

    def with_defaults(self, **values: Any) -> Fields:
        """Return the fields with values for those that are absent, given by their usual names."""
        own = {self.name(key): value for key, value in values.items()}
        return replace(self, values={**own, **self.values})

    def with_values(self, **values: Any) -> Fields:
        """Return the fields with other values, given by their usual names."""
        own = {self.name(key): value for key, value in values.items()}
        return replace(self, values={**self.values, **own})

    def at(self, index: int, *keys: str) -> Fields:
        """Return the fields of one layer: of fields that list a value by layer, given by their
        usual names, its own; what is null or beyond a list is absent."""
        own = {name: self.values.get(name) for name in map(self.name, keys)}
        kept = {name: value for name, value in self.values.items() if name not in own}
        for name, value in own.items():
            if isinstance(value, list):
                value = value[index] if index < len(value) else None
            if value is not None:
                kept[name] = value
        return replace(self, values=kept)

    def name(self, key: str) -> str:
        """Return the name that a field has here."""
        return self.names.get(key, key)

    def has(self, key: str) -> bool:
        """Return True for a field that is there and not null."""
        return self.values.get(self.name(key)) is not None

    def without_nulls(self) -> Fields:
        """Return the fields with every null taken for absent."""
        kept = {key: value for key, value in self.values.items() if value is not None}
        return replace(self, values=kept)

    def section(self, key: str) -> Fields:
        """Return the fields of an object, without its nulls; none where it is absent or null."""
        value = self.values.get(self.name(key))
        if value is not None and not isinstance(value, Mapping):
            raise self.unusable(key, "an object")
        return Fields(value or {}, f"{self.prefix}{self.name(key)}.").without_nulls()

    def whole(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_WHOLE
    ) -> int:
        """Return a whole number within bounds."""
        value = self.values.get(self.name(key), default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.unusable(key, f"a whole number from {minimum} to {maximum}")
        return value

    def number(
        self, key: str, default: float | None = None, *, minimum: float = 0.0, maximum: float
    ) -> float:
        """Return a number within bounds."""
        value = self.values.get(self.name(key), default)
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            raise self.unusable(key, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self.values.get(self.name(key), default)
        if not isinstance(value, bool):
            raise self.unusable(key, "true or false")
        return value

    def word(self, key: str, default: str | None = None, *, choices: Collection[str] = ()) -> str:
        """Return a text; with choices, one of them."""
        value = self.values.get(self.name(key), default)
        if not isinstance(value, str) or (choices and value not in choices):
            raise self.unusable(key, " or ".join(choices) or "a text")
        return value

    def kinds(self, key: str, choices: Collection[str], count: int) -> Sequence[str]:
        """Return the kinds of `count` layers, of the choices, that a field lists."""
        listed = self.values.get(self.name(key))
        kinds = listed if isinstance(listed, list) else []
        if len(kinds) != count or not all(
            isinstance(kind, str) and kind in choices for kind in kinds
        ):
            raise self.unusable(key, f"{' or '.join(choices)} for each of {count} layers")
        return kinds

    def wholes(self, key: str) -> tuple[int, ...]:
        """Return a list of whole numbers; none where the field is absent."""
        listed = self.values.get(self.name(key), [])
        if not isinstance(listed, list) or not all(
            type(one) is int and 0 <= one <= MAX_WHOLE for one in listed
        ):
            raise self.unusable(key, f"a list of whole numbers from 0 to {MAX_WHOLE}")
        return tuple(listed)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the token ids that a field gives as one or a list; none where it is null."""
        value = self.values.get(self.name(key))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in ids):
            raise self.unusable(key, "a token id, or a list of them")
        return tuple(ids)

    def unusable(self, key: str, expected: str) -> InvalidInputError:
        """Return the error of a field whose value is not as expected."""
        name = self.name(key)
        there = name in self.values
        return InvalidInputError(
            f"config.json has no usable {self.prefix}{name}",
            expected=expected,
            found=repr(self.values[name])[:100] if there else "no such field",
            todo="Correct config.json, or get it again from the checkpoint's source",
        )
