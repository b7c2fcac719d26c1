"""Compilation of the CPU kernels by numba: without the GIL, kept on disk where that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return names, times and sizes of all sources that compiled functions are spread over."""
    root = Path(__file__).parents[1]
    files = [(path, path.stat()) for path in sorted(root.rglob("*.py"))]
    return tuple((str(path.relative_to(root)), s.st_mtime_ns, s.st_size) for path, s in files)


SOURCES = _stamp()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first call, for the types of that call.

    numba's cache on disk looks at a function's own file; these call each other across files, so
    that a change in any of them must count. Without a folder to write to nothing is cached.
    """
    return _compiled(function, no_cfunc_wrapper=True)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that compiled ones alone call: without a Python wrapper, which would take
    a sixth of the time to compile.
    """
    return _compiled(function, no_cfunc_wrapper=True, no_cpython_wrapper=True)


def _compiled(function: Callable[..., Any], **wrappers: bool) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"} | wrappers
    try:
        dispatcher: Any = njit(function, cache=True, **options)
        dispatcher._cache._cache_file._source_stamp = SOURCES
    except RuntimeError:
        dispatcher = njit(function, **options)
    return dispatcher
