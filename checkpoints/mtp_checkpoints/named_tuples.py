"""Named tuples in bulk: a large checkpoint has 100,000 tensors, each with several of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

_Row = TypeVar("_Row", bound=tuple[Any, ...])


def rows_of(kind: type[_Row], **columns: Iterable[Any]) -> Iterator[_Row]:
    """Yield named tuples of a kind from the columns of its fields, as many as the shortest has.

    A field without a column has its default. Constructors of their own are Python code, which takes
    twice as long.
    """
    named: Any = kind
    defaults = {field: repeat(value) for field, value in named._field_defaults.items()}
    every = defaults | columns
    values = zip(*(every[field] for field in named._fields), strict=False)
    return map(partial(tuple.__new__, kind), values)
