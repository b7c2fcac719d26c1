"""JSON parser that refuses what is no JSON, or no text, though Python's json takes it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.sources.byte_source import Place
from mtp_checkpoints.sources.file_kinds import MOST_TELLING, kind_of_file
from mtp_checkpoints.sources.local_folder import LocalFolder

MAX_DEPTH = 64  # the deepest files of real checkpoints, tokenizers, have about 10
_TOO_DEEP = f"nested deeper than {MAX_DEPTH}"
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class DuplicateKeyError(ValueError):
    """A duplicate key in one object; its argument is the key."""

    def __str__(self) -> str:
        return f"the key {self.args[0]!r} twice"


def parse(raw: bytes) -> Any:
    """Return the value of UTF-8 JSON.

    Raises ValueError for anything else: also for duplicate keys, of which json takes the last, for
    NaN and infinities, for halves of surrogate pairs, and for deep nesting.
    """
    text = raw.decode()
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):  # advice for programmers
            raise ValueError("a whole number of thousands of digits") from None
        raise
    # Every key has a colon behind it: where no string holds one, a key twice is a colon too many.
    # Looking at the keys of each object as it is made would take as long as the parsing.
    if _count_keys(value) != raw.count(b":"):
        json.loads(text, object_pairs_hook=_refuse_duplicates)
    if rb"\u" in raw and _ESCAPED_SURROGATE.search(raw):
        _check_text(value)
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise DuplicateKeyError(key)


def _refuse_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        _refuse_number(digits[:50])
    return value


def _levels(value: Any) -> Iterator[tuple[list[Any], list[dict[str, Any]]]]:
    """Yield the values that are nested equally deep, and the objects among them, outermost first.

    Raises ValueError for a value that recursive code, as of json and repr, may not get through.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        types = set(map(type, level))
        objects = [value for value in level if type(value) is dict] if dict in types else []
        arrays = [value for value in level if type(value) is list] if list in types else []
        yield level, objects
        if not objects and not arrays:
            return
        level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(arrays)]
    raise ValueError(_TOO_DEEP)


def _count_keys(value: Any) -> int:
    """Return the number of keys in all objects of a value, those inside others included."""
    return sum(sum(map(len, objects)) for _, objects in _levels(value))


def _check_text(value: Any) -> None:
    """Refuse strings that UTF-8 cannot hold (ValueError)."""
    for level, objects in _levels(value):
        texts = (text for text in level if type(text) is str)
        try:
            "".join(chain(texts, chain.from_iterable(objects))).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair in a string") from None


def _unparsable(path: Place, found: str) -> InvalidInputError:
    return InvalidInputError(
        "A JSON file cannot be parsed", where=path, found=found, todo="Download it again"
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a local JSON file holds (InvalidInputError, IoError)."""
    return parsed_json_object(path, LocalFolder(path.parent).read(path.name))


def parsed_json_object(path: Place, raw: bytes) -> dict[str, Any]:
    """Return the object in a JSON file's bytes (InvalidInputError naming the file)."""
    try:
        value = parse(raw)
    except ValueError as error:
        raise _unparsable(path, kind_of_file(raw[:MOST_TELLING]) or str(error)[:200]) from None
    if not isinstance(value, dict):
        raise InvalidInputError(
            "A JSON file holds no object", where=path, expected="{...}", found=type(value).__name__
        )
    return value
