"""Progress of a model that is loaded, shown by whoever asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path

# Takes the bytes that were just read; callable from any thread.
Advance = Callable[[int], object]
# Shows the loading of a folder of so many bytes while its block runs.
ShowLoading = Callable[[Path, int], AbstractContextManager[Advance]]


def _unseen(folder: Path, total_bytes: int) -> AbstractContextManager[Advance]:
    return nullcontext(int)


_shown_by: ContextVar[ShowLoading] = ContextVar("shown_by", default=_unseen)


@contextmanager
def loading_shown(show: ShowLoading) -> Iterator[None]:
    """Show every model that this thread loads while the block runs."""
    token = _shown_by.set(show)
    try:
        yield
    finally:
        _shown_by.reset(token)


def show_loading(folder: Path, total_bytes: int) -> AbstractContextManager[Advance]:
    """Show that a model is loaded while the block runs, to those who asked for it."""
    return _shown_by.get()(folder, total_bytes)
