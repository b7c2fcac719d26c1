"""Named tuples as a large checkpoint needs them: it has 100,000 tensors, each with several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

_Row = TypeVar("_Row", bound=tuple[Any, ...])


def rows_of(kind: type[_Row], *columns: Iterable[Any]) -> Iterator[_Row]:
    """Yield named tuples of a kind from columns of all its fields, as many as the shortest has.

    Their own constructors are Python code, which takes twice as long.
    """
    return map(partial(tuple.__new__, kind), zip(*columns, strict=False))
