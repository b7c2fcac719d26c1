"""How the compiled CPU kernels are compiled: without the GIL, and kept on disk where that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_FOLDERS = (".", "decoder", "quantize", "verify_attention")


def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the sources that compiled functions are spread over."""
    here = Path(__file__).parent
    files = sorted(path for folder in _FOLDERS for path in (here / folder).glob("*.py"))
    return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)


SOURCES = _stamp()


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first call, for the types of that call.

    numba's cache on disk looks at the caller's own file; these functions call each other across
    files, so that a change in any of them counts. Without a folder to write to nothing is cached.
    """
    return _compiled(function, no_cfunc_wrapper=True)


def inner(function: Callable[..., Any]) -> Any:
    """The same for a function that compiled ones alone call, without what Python would call it by:
    that would take a sixth of the time to compile."""
    return _compiled(function, no_cfunc_wrapper=True, no_cpython_wrapper=True)


def _compiled(function: Callable[..., Any], **wrappers: bool) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"} | wrappers
    try:
        dispatcher: Any = njit(function, cache=True, **options)
        dispatcher._cache._cache_file._source_stamp = SOURCES
    except RuntimeError:
        dispatcher = njit(function, **options)
    return dispatcher
